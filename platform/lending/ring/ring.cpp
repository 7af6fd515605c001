// The hot path of the task ring: posting, waiting and serving without Python in between.
//
// The layout of the shared memory and the argument for its ordering stand in ring.py, the meaning
// of each call in borrower.py and attention_server.py. vLLM's operators are looked up by name at
// run time.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <linux/futex.h>
#include <omp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <ctime>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

using Word = std::atomic<int64_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 8);

// As in ring.py.
enum ControlLine {
  kGranted, kWanted, kVacated, kClosed, kBorrower, kLender, kStep, kPosted, kDone, kSleeping,
  kBorrowerStats, kLenderStats
};
enum RingTask { kAttend, kWrite, kRead };
enum Closed { kOpen, kDrained, kRevoked, kTimedOut, kDied, kRefused, kFailed };
// Words of the lender's own page (lent_ring.py).
enum Own { kOwnGranted, kOwnStats };
// The lender's counters.
enum Count { kPolled, kIdled, kServiceNs, kPickupNs };
constexpr int kLineWords = 16;
// So that a counter that somebody spoiled does not outgrow its word.
constexpr int64_t kMostCounted = (int64_t{1} << 62) - 1;

constexpr int64_t kMicrosecond = 1'000;
constexpr int64_t kMillisecond = 1'000'000;
// A wait that lasts so long lets others have the core between its looks.
constexpr int64_t kYieldAfter = 200 * kMicrosecond;
// A borrower looks so often whether its lender lives, a lender whether its borrowers do.
constexpr int64_t kBorrowerLooks = kMillisecond;
constexpr int64_t kLenderLooks = 100 * kMillisecond;
// What lies between two of a borrower's looks counts no longer: meanwhile it had no core, nor perhaps
// had its lender.
constexpr int64_t kLongestLook = 10 * kMillisecond;
// A kernel that cannot wait for several futexes at once looks so often at all of them.
constexpr int64_t kSeveralLooks = 200 * kMicrosecond;
constexpr int kSpins = 64;

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Bytes are copied from and to the addresses of tensors, which must be the CPU's own.
void check_on_cpu(const at::Tensor& tensor, const char* what) {
  TORCH_CHECK(tensor.is_cpu(), what, " on ", tensor.device(),
              " cannot be lent: the task ring copies between tensors on the CPU only");
}

at::Tensor on_cpu(at::Tensor tensor, const char* what) {
  check_on_cpu(tensor, what);
  return tensor;
}

// One ring as this process maps it. The tensors keep the mapping alive.
class Ring {
 public:
  Ring(at::Tensor control, at::Tensor query_start_loc, at::Tensor seq_lens, at::Tensor block_table,
       at::Tensor slot_mapping, at::Tensor query, at::Tensor key, at::Tensor value,
       at::Tensor output)
      : query_start_loc(on_cpu(std::move(query_start_loc), "a step's metadata")),
        seq_lens(on_cpu(std::move(seq_lens), "a step's metadata")),
        block_table(on_cpu(std::move(block_table), "a step's metadata")),
        slot_mapping(on_cpu(std::move(slot_mapping), "a step's metadata")),
        query(on_cpu(std::move(query), "a ring's rows")),
        key(on_cpu(std::move(key), "a ring's rows")),
        value(on_cpu(std::move(value), "a ring's rows")),
        output(on_cpu(std::move(output), "a ring's rows")),
        control_(on_cpu(std::move(control), "a ring's control words")),
        words_(reinterpret_cast<Word*>(control_.data_ptr<int64_t>())) {}

  Word& word(ControlLine line, int place = 0) { return words_[line * kLineWords + place]; }

  int64_t load(ControlLine line, int place = 0) {
    return word(line, place).load(std::memory_order_relaxed);
  }

  void store(ControlLine line, int place, int64_t value) {
    word(line, place).store(value, std::memory_order_relaxed);
  }

  // To a word that this end alone writes, unless the other spoils it.
  void add(ControlLine line, int place, int64_t value) {
    store(line, place, (static_cast<uint64_t>(load(line, place)) + value) & kMostCounted);
  }

  int64_t counter(ControlLine line) { return load(line) & kMostCounted; }

  // Once it was seen so, the other end cannot open it again, and other processes of this end
  // shall see it, too.
  bool closed() {
    const int64_t seen = load(kClosed);
    if (seen == kOpen && closed_ == kOpen) return false;
    if (closed_ == kOpen) closed_ = seen;
    if (seen == kOpen) store(kClosed, 0, closed_);
    return true;
  }

  void shut(Closed reason) {
    if (closed()) return;
    int64_t open = kOpen;
    word(kClosed).compare_exchange_strong(open, reason);
    closed_ = reason;
  }

  // The half of the counter of posted tasks that changes with every task.
  uint32_t* futex() {
    return reinterpret_cast<uint32_t*>(&word(kPosted)) +
           (std::endian::native == std::endian::little ? 0 : 1);
  }

  void wake() {
    syscall(SYS_futex, futex(), FUTEX_WAKE, std::numeric_limits<int>::max(), nullptr, nullptr, 0);
  }

  at::Tensor query_start_loc, seq_lens, block_table, slot_mapping, query, key, value, output;

 private:
  at::Tensor control_;
  Word* words_;
  // Of one thread at a time: the borrower's, or who holds the server's mutex.
  int64_t closed_ = kOpen;
};

// Whether the other worker's process is gone; a process that nobody has reaped is, too.
class RingPeer {
 public:
  RingPeer(std::shared_ptr<Ring> ring, ControlLine end) : ring_(std::move(ring)), end_(end) {}
  RingPeer(const RingPeer&) = delete;
  ~RingPeer() {
    if (descriptor_ >= 0) close(descriptor_);
  }

  // Soon after it came, lest its number meanwhile means another process.
  void meet() {
    if (descriptor_ >= 0 || gone_) return;
    const int64_t pid = ring_->load(end_);
    if (pid == 0) return;
    // What is no pid counts as a process that is gone.
    if (pid < 0 || pid > std::numeric_limits<pid_t>::max()) {
      gone_ = true;
      return;
    }
    descriptor_ = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
    gone_ = descriptor_ < 0 && (errno == ESRCH || errno == EINVAL);
  }

  bool gone() {
    meet();
    if (descriptor_ >= 0) {
      pollfd ended{descriptor_, POLLIN, 0};
      gone_ = ::poll(&ended, 1, 0) > 0;
    }
    return gone_;
  }

 private:
  std::shared_ptr<Ring> ring_;
  ControlLine end_;
  int descriptor_ = -1;
  bool gone_ = false;
};

// Copy between rows of a [tokens, heads, size] or [tokens, heads * size] tensor and packed rows.
template <typename Copy>
void each_row(const at::Tensor& rows, const at::Tensor& packed, Copy copy) {
  check_on_cpu(rows, "a task's tensor");
  const int64_t tokens = rows.size(0), row = packed.stride(0) * packed.element_size();
  TORCH_CHECK(rows.stride(-1) == 1 && rows.scalar_type() == packed.scalar_type() &&
                  rows.numel() == tokens * packed.stride(0) && tokens <= packed.size(0),
              "a task's tensor of ", rows.sizes(), " and type ", rows.scalar_type(),
              " is not of the ring's geometry ", packed.sizes());
  const bool whole = rows.dim() == 2 || rows.stride(1) == rows.size(2);
  auto* strided = static_cast<char*>(rows.data_ptr());
  auto* dense = static_cast<char*>(packed.data_ptr());
  const int64_t step = rows.stride(0) * rows.element_size();
  if (whole && step == row) {
    copy(strided, dense, tokens * row);
    return;
  }
  const int64_t parts = whole ? 1 : rows.size(1), size = row / parts;
  const int64_t part = whole ? 0 : rows.stride(1) * rows.element_size();
  for (int64_t token = 0; token < tokens; ++token)
    for (int64_t i = 0; i < parts; ++i)
      copy(strided + token * step + i * part, dense + token * row + i * size, size);
}

void pack(const at::Tensor& rows, const at::Tensor& packed) {
  each_row(rows, packed, [](char* from, char* to, size_t size) { std::memcpy(to, from, size); });
}

void unpack(const at::Tensor& packed, const at::Tensor& rows) {
  each_row(rows, packed, [](char* to, char* from, size_t size) { std::memcpy(to, from, size); });
}

class Borrower {
 public:
  explicit Borrower(std::shared_ptr<Ring> ring)
      : ring_(std::move(ring)), lender_(ring_, kLender), posted_(ring_->counter(kPosted)) {}

  void post(int64_t layer, int64_t tokens, const at::Tensor& query, const at::Tensor& key,
            const at::Tensor& value) {
    if (ring_->closed()) return;
    const int64_t begin = now_ns();
    TORCH_CHECK(query.size(0) == tokens && key.size(0) == tokens && value.size(0) == tokens,
                "a task of ", query.size(0), " tokens in a step of ", tokens);
    pack(query, ring_->query);
    pack(key, ring_->key);
    pack(value, ring_->value);
    announce(layer);
    ring_->add(kBorrowerStats, 0, 1);
    ring_->add(kBorrowerStats, 1, now_ns() - begin);
  }

  // What is copied stands in the ring, or will stand there.
  bool copy(int64_t layer, double timeout_s) {
    py::gil_scoped_release no_python;
    if (ring_->closed()) return false;
    announce(layer);
    return done(now_ns(), static_cast<int64_t>(timeout_s * 1e9));
  }

  bool wait(const at::Tensor& output, double timeout_s) {
    py::gil_scoped_release no_python;
    const int64_t begin = now_ns(), timeout = static_cast<int64_t>(timeout_s * 1e9);
    if (!done(begin, timeout)) return false;
    unpack(ring_->output, output);
    const int64_t waited = now_ns() - begin;
    ring_->store(kBorrower, 1, begin + waited);
    ring_->add(kBorrowerStats, 2, waited);
    ring_->store(kBorrowerStats, 3, std::max(waited, ring_->load(kBorrowerStats, 3)));
    return true;
  }

 private:
  void announce(int64_t layer) {
    const int64_t now = now_ns();
    ring_->store(kPosted, 1, layer);
    ring_->store(kPosted, 2, now);
    ring_->word(kPosted).store(++posted_, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (ring_->load(kSleeping)) ring_->wake();
    lender_.meet();
    ring_->store(kBorrower, 1, now);
  }

  bool done(int64_t begin, int64_t timeout) {
    int64_t looked = begin, waited = 0;
    for (;;) {
      // Before it looks for the result, lest a halt of this process pass for the lender's.
      const int64_t now = now_ns();
      for (int i = 0; i < kSpins; ++i) {
        // A closed ring's tasks are answered by nobody, or too late.
        if (ring_->closed()) return false;
        if (ring_->word(kDone).load(std::memory_order_acquire) == posted_) return true;
        relax();
      }
      if (now - looked >= kBorrowerLooks) {
        waited += std::min(now - looked, kLongestLook);
        looked = now;
        if (waited >= timeout) ring_->shut(kTimedOut);
        if (lender_.gone()) ring_->shut(kDied);
      }
      if (now - begin >= kYieldAfter) sched_yield();
    }
  }

  std::shared_ptr<Ring> ring_;
  RingPeer lender_;
  int64_t posted_;
};

// vLLM's CPU attention, by the names under which it registers its operators.
class Attention {
 public:
  Attention()
      : metadata_(find("_C::get_scheduler_metadata", 13)),
        write_(find("_C::cpu_attn_reshape_and_cache", 9)),
        attend_(find("_C::cpu_attention_with_kv_cache", 18)),
        whole_("auto") {}

  struct Shape {
    int64_t query_heads, kv_heads, head_size, sliding_window;
    double scale, softcap;
    bool split_kv;
    at::ScalarType dtype;
    c10::IValue isa;
  };

  at::Tensor metadata(const Shape& of, int64_t requests, const at::Tensor& query_start_loc,
                      const at::Tensor& seq_lens) {
    stack_.clear();
    torch::jit::push(stack_, requests, of.query_heads, of.kv_heads, of.head_size, seq_lens,
                     of.dtype, query_start_loc, true, of.sliding_window, of.isa, of.split_kv,
                     c10::IValue(), whole_);
    metadata_.callBoxed(stack_);
    return stack_.at(0).toTensor();
  }

  void write(const Shape& of, const at::Tensor& key, const at::Tensor& value,
             const at::Tensor& key_cache, const at::Tensor& value_cache,
             const at::Tensor& slot_mapping) {
    stack_.clear();
    torch::jit::push(stack_, key, value, key_cache, value_cache, slot_mapping, of.isa, 1.0, 1.0,
                     whole_);
    write_.callBoxed(stack_);
  }

  void attend(const Shape& of, const at::Tensor& query, const at::Tensor& key_cache,
              const at::Tensor& value_cache, const at::Tensor& output,
              const at::Tensor& query_start_loc, const at::Tensor& seq_lens,
              const at::Tensor& block_table, const at::Tensor& metadata) {
    stack_.clear();
    torch::jit::push(stack_, query, key_cache, value_cache, output, query_start_loc, seq_lens,
                     of.scale, true, c10::IValue(), of.sliding_window, block_table, of.softcap,
                     metadata, c10::IValue(), c10::IValue(), 1.0, 1.0, whole_);
    attend_.callBoxed(stack_);
  }

 private:
  static c10::OperatorHandle find(const char* name, size_t arguments) {
    auto found = c10::Dispatcher::singleton().findSchema({name, ""});
    TORCH_CHECK(found && found->schema().arguments().size() == arguments, "there is no operator ",
                name, " with ", arguments,
                " arguments: import vLLM's kernels first, of the version that Loomserve names");
    return *found;
  }

  c10::OperatorHandle metadata_, write_, attend_;
  c10::IValue whole_;
  torch::jit::Stack stack_;
};

using Caches = std::vector<std::pair<at::Tensor, at::Tensor>>;

// In which row of its layers' caches a borrower's block is (layout.py).
struct Rows {
  int64_t abreast, apart;
  int64_t of(int64_t block) const { return block % abreast * apart + block / abreast; }
  int64_t blocks(int64_t rows) const { return (rows - (abreast - 1) * apart) * abreast; }
  // Of the blocks from first to before end, those in this place beside others.
  std::pair<int64_t, int64_t> between(int64_t beside, int64_t first, int64_t end) const {
    const auto row = [&](int64_t block) {
      return beside * apart + (std::max<int64_t>(0, block - beside) + abreast - 1) / abreast;
    };
    return {row(first), row(end)};
  }
};

// One ring at the lender, with the borrower's KV in the lender's memory.
class ServedRing {
 public:
  ServedRing(std::shared_ptr<Ring> of, at::Tensor own, Attention::Shape shape, Caches caches,
             py::handle layers, Rows rows)
      : ring(of), borrower(of, kBorrower), own_(on_cpu(std::move(own), "a lender's own words")),
        own_words_(reinterpret_cast<Word*>(own_.data_ptr<int64_t>())), shape_(std::move(shape)), caches_(std::move(caches)),
        layers_(layers), rows_(rows),
        blocks_(rows.blocks(caches_.at(0).first.size(0))), block_size_(caches_.at(0).first.size(2)),
        done_(ring->load(kDone)), done_at_(now_ns()), query_start_loc_(at::empty_like(ring->query_start_loc)),
        seq_lens_(at::empty_like(ring->seq_lens)), block_table_(at::zeros_like(ring->block_table)),
        slot_mapping_(at::empty_like(ring->slot_mapping)) {}

  bool posted() {
    return ring->word(kPosted).load(std::memory_order_acquire) != done_ && !ring->closed();
  }

  // At most one task; false where there is none to serve.
  bool serve(Attention& attention, Count place) {
    if (!posted()) return false;
    const int64_t begin = now_ns(), number = ring->load(kPosted), layer = ring->load(kPosted, 1);
    if (number != done_ + 1 || layer < 0 || layer >= static_cast<int64_t>(caches_.size()) ||
        !step_is_valid(attention)) {
      ring->shut(kRefused);
      return false;
    }
    const auto& [key_cache, value_cache] = caches_[layer];
    written_ = std::max(written_, end_);
    if (work_ == kAttend) {
      if (layers_.ptr() != Py_None) {
        compute_layers();
      } else {
        attention.write(shape_, key_, value_, key_cache, value_cache, slots_);
        attention.attend(shape_, query_, key_cache, value_cache, output_, starts_, lens_, table_,
                         metadata_);
      }
      count(place, 1);
      count(kServiceNs, now_ns() - begin);
      // No task is posted before the one before it is done.
      count(kPickupNs, begin - std::min(std::max(ring->load(kPosted, 2), done_at_), begin));
    } else {
      copy(key_, key_cache);
      copy(value_, value_cache);
    }
    done_ = number;
    done_at_ = now_ns();
    ring->word(kDone).store(number, std::memory_order_release);
    return true;
  }

  // Set to zero what the borrower has written from this block of its own on.
  void clear(int64_t first) {
    if (first >= written_) return;
    for (int64_t beside = 0; beside < rows_.abreast; ++beside) {
      const auto [begin, end] = rows_.between(beside, first, written_);
      for (const auto& [key, value] : caches_) {
        key.narrow(0, begin, end - begin).zero_();
        value.narrow(0, begin, end - begin).zero_();
      }
    }
    written_ = first;
  }

  // What the lender no longer grants.
  void clear_given_back() { clear(own_words_[kOwnGranted].load(std::memory_order_relaxed)); }

  std::shared_ptr<Ring> ring;
  RingPeer borrower;

 private:
  // On the ring, too, so that the borrower sees it.
  void count(Count figure, int64_t amount) {
    Word& own = own_words_[kOwnStats + figure];
    const int64_t total = own.load(std::memory_order_relaxed) + amount;
    own.store(total, std::memory_order_relaxed);
    ring->store(kLenderStats, figure, total);
  }

  // What is looked at once is a copy that the borrower cannot change afterwards.
  bool step_is_valid(Attention& attention) {
    const int64_t step = ring->load(kStep);
    if (step != step_) {
      step_.reset();
      work_ = ring->load(kStep, 3);
      if (!(work_ == kAttend ? take_step() : take_copy())) return false;
      if (work_ == kAttend)
        metadata_ = attention.metadata(shape_, starts_.size(0) - 1, starts_, lens_);
      step_ = step;
    }
    return end_ <= std::min(blocks_, own_words_[kOwnGranted].load(std::memory_order_relaxed));
  }

  bool take_copy() {
    const int64_t blocks = ring->load(kStep, 1);
    const int64_t most = std::min(ring->key.size(0) / block_size_, ring->block_table.size(1));
    if ((work_ != kWrite && work_ != kRead) || blocks < 1 || blocks > most) return false;
    const auto* table = ring->block_table.data_ptr<int32_t>();
    copied_.assign(table, table + blocks);
    const auto [low, high] = std::minmax_element(copied_.begin(), copied_.end());
    if (*low < 0) return false;
    end_ = int64_t{*high} + 1;
    for (auto& block : copied_) block = rows_.of(block);
    const std::vector<int64_t> shape{blocks, shape_.kv_heads, block_size_, shape_.head_size};
    key_ = ring->key.narrow(0, 0, blocks * block_size_).view(shape);
    value_ = ring->value.narrow(0, 0, blocks * block_size_).view(shape);
    return true;
  }

  void compute_layers() {
    py::gil_scoped_acquire python;
    try {
      layers_(query_, output_, starts_, lens_, table_, slots_, metadata_);
    } catch (const py::error_already_set& error) {
      // Whoever catches that one must have Python, too.
      throw std::runtime_error(error.what());
    }
  }

  void copy(const at::Tensor& rows, const at::Tensor& cache) {
    for (size_t i = 0; i < copied_.size(); ++i) {
      at::Tensor row = rows.select(0, i), block = cache.select(0, copied_[i]);
      work_ == kWrite ? block.copy_(row) : row.copy_(block);
    }
  }

  bool take_step() {
    const int64_t requests = ring->load(kStep, 1), tokens = ring->load(kStep, 2);
    const int64_t width = ring->block_table.size(1);
    if (requests < 1 || requests > ring->seq_lens.size(0) || tokens < 1 ||
        tokens > ring->slot_mapping.size(0))
      return false;
    auto* starts = query_start_loc_.data_ptr<int32_t>();
    auto* lens = seq_lens_.data_ptr<int32_t>();
    auto* slots = slot_mapping_.data_ptr<int64_t>();
    std::memcpy(starts, ring->query_start_loc.data_ptr(), (requests + 1) * sizeof(*starts));
    std::memcpy(lens, ring->seq_lens.data_ptr(), requests * sizeof(*lens));
    std::memcpy(slots, ring->slot_mapping.data_ptr(), tokens * sizeof(*slots));
    if (starts[0] != 0 || starts[requests] != tokens) return false;
    int64_t end = 0;
    for (int64_t i = 0; i < requests; ++i) {
      const int64_t added = int64_t{starts[i + 1]} - starts[i];
      if (added < 1 || lens[i] < added) return false;
      const int64_t used = (lens[i] + block_size_ - 1) / block_size_;
      if (used > width) return false;
      auto* table = block_table_.data_ptr<int32_t>() + i * width;
      std::memcpy(table, ring->block_table.data_ptr<int32_t>() + i * width,
                  used * sizeof(*table));
      const auto [low, high] = std::minmax_element(table, table + used);
      if (*low < 0) return false;
      end = std::max(end, int64_t{*high} + 1);
      for (int64_t at = 0; at < used; ++at) table[at] = rows_.of(table[at]);
    }
    const auto [low, high] = std::minmax_element(slots, slots + tokens);
    if (*low < 0) return false;
    end_ = std::max(end, *high / block_size_ + 1);
    for (int64_t at = 0; at < tokens; ++at)
      slots[at] = rows_.of(slots[at] / block_size_) * block_size_ + slots[at] % block_size_;
    starts_ = query_start_loc_.narrow(0, 0, requests + 1);
    lens_ = seq_lens_.narrow(0, 0, requests);
    table_ = block_table_.narrow(0, 0, requests);
    slots_ = slot_mapping_.narrow(0, 0, tokens);
    query_ = ring->query.narrow(0, 0, tokens);
    key_ = ring->key.narrow(0, 0, tokens);
    value_ = ring->value.narrow(0, 0, tokens);
    output_ = ring->output.narrow(0, 0, tokens);
    return true;
  }

  at::Tensor own_;
  Word* own_words_;
  Attention::Shape shape_;
  Caches caches_;
  // Alive as long as the ring is open, or None: the borrower's tasks are attention.
  py::handle layers_;
  Rows rows_;
  int64_t blocks_, block_size_, done_, done_at_;
  at::Tensor query_start_loc_, seq_lens_, block_table_, slot_mapping_;
  // Of the step that is being served: blocks from end_ on are not touched.
  std::optional<int64_t> step_;
  int64_t end_ = 0, work_ = kAttend;
  // Blocks from it on hold nothing of the borrower's.
  int64_t written_ = 0;
  std::vector<int32_t> copied_;
  at::Tensor starts_, lens_, table_, slots_, query_, key_, value_, output_, metadata_;
};

using ServedRings = std::vector<std::shared_ptr<ServedRing>>;

class AttentionServer {
 public:
  explicit AttentionServer(int64_t spin_ns) : spin_ns_(spin_ns) {}
  ~AttentionServer() { stop(); }

  void open(std::shared_ptr<Ring> ring, at::Tensor own, int64_t query_heads, double scale, const std::string& isa,
            int64_t sliding_window, double softcap, bool split_kv, Caches caches,
            py::handle layers, int64_t abreast, int64_t apart) {
    for (const auto& [key, value] : caches) {
      check_on_cpu(key, "a KV cache");
      check_on_cpu(value, "a KV cache");
    }
    const auto& cache = caches.at(0).first;
    Attention::Shape shape{query_heads,    cache.size(1), cache.size(3), sliding_window,
                           scale,          softcap,       split_kv,      cache.scalar_type(),
                           c10::IValue(isa)};
    auto each = std::make_shared<ServedRing>(std::move(ring), std::move(own), std::move(shape),
                                             std::move(caches), layers, Rows{abreast, apart});
    each->ring->store(kLender, 1, now_ns());
    py::gil_scoped_release no_python;
    std::unique_lock lock(mutex_);
    if (!attention_) attention_.emplace();
    rings_.push_back(std::move(each));
    if (!thread_.joinable()) start_thread();
    rouse();
  }

  void close(const std::shared_ptr<Ring>& ring) {
    py::gil_scoped_release no_python;
    std::unique_lock lock(mutex_);
    ring->store(kSleeping, 0, 0);
    c10::InferenceMode no_autograd;
    std::erase_if(rings_, [&](const auto& each) {
      if (each->ring != ring) return false;
      each->clear(0);
      return true;
    });
  }

  int64_t poll() {
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) {
      py::gil_scoped_release no_python;
      lock.lock();
    }
    const int64_t now = now_ns();
    bool posted = false;
    for (const auto& each : rings_) {
      each->ring->store(kLender, 1, now);
      posted |= each->posted();
    }
    if (!posted) return 0;
    py::gil_scoped_release no_python;
    const int64_t served = serve_all(kPolled);
    // Before Python is asked back, which may take a while.
    lock.unlock();
    return served;
  }

  void busy() {
    py::gil_scoped_release no_python;
    idle_.store(false);
    std::unique_lock lock(mutex_);
    c10::InferenceMode no_autograd;
    for (const auto& each : rings_) {
      each->ring->store(kSleeping, 0, 0);
      each->clear_given_back();
    }
    look_for_dead(now_ns());
  }

  void idle() {
    py::gil_scoped_release no_python;
    std::unique_lock lock(mutex_);
    idle_.store(true);
    rouse();
  }

  void stop() {
    {
      py::gil_scoped_release no_python;
      std::unique_lock lock(mutex_);
      stopped_ = true;
      rouse();
      lock.unlock();
      if (thread_.joinable()) thread_.join();
    }
    rings_.clear();
  }

 private:
  // Adds to this counter.
  int64_t serve_all(Count place) {
    c10::InferenceMode no_autograd;
    int64_t served = 0;
    for (const auto& each : rings_) {
      try {
        served += each->serve(*attention_, place);
      } catch (const std::exception& error) {
        each->ring->shut(kFailed);
        TORCH_WARN("a borrower's attention failed: ", error.what());
      }
    }
    return served;
  }

  void look_for_dead(int64_t now) {
    if (now - looked_ < kLenderLooks) return;
    looked_ = now;
    for (const auto& each : rings_)
      if (each->borrower.gone()) each->ring->shut(kDied);
  }

  // Have the idle thread look at everything anew. As it may be about to sleep on what it saw
  // before, posts shall wake it until it has looked.
  void rouse() {
    awake_.notify_one();
    if (!asleep_) return;
    for (const auto& each : rings_) {
      each->ring->word(kSleeping).store(1);
      each->ring->wake();
    }
  }

  // It computes with as many threads as the calling one, on the same cores.
  void start_thread() {
    const int threads = at::get_num_threads();
    cpu_set_t cores;
    CPU_ZERO(&cores);
#pragma omp parallel num_threads(threads)
    {
      cpu_set_t own;
      CPU_ZERO(&own);
      sched_getaffinity(0, sizeof own, &own);
#pragma omp critical
      CPU_OR(&cores, &cores, &own);
    }
    thread_ = std::thread([this, threads, cores] {
      pthread_setname_np(pthread_self(), "lending-idle");
      sched_setaffinity(0, sizeof cores, &cores);
      at::set_num_threads(threads);
      serve_while_idle();
    });
  }

  void serve_while_idle() {
    std::unique_lock lock(mutex_);
    int64_t last = now_ns();
    while (!stopped_) {
      if (!idle_.load() || rings_.empty()) {
        awake_.wait(lock);
        last = now_ns();
        continue;
      }
      const int64_t served = serve_all(kIdled);
      const int64_t now = now_ns();
      for (const auto& each : rings_) each->ring->store(kLender, 1, now);
      look_for_dead(now);
      if (served) {
        last = now;
      } else if (now - last >= spin_ns_) {
        sleep(lock);
        last = now_ns();
        continue;
      }
      lock.unlock();
      for (int i = 0; i < kSpins; ++i) relax();
      lock.lock();
    }
  }

  // Until something is posted or somebody rouses it, but no longer than until it must look who
  // is dead.
  void sleep(std::unique_lock<std::mutex>& lock) {
    const ServedRings rings = rings_;
    std::vector<uint32_t> seen;
    for (const auto& each : rings) {
      each->ring->word(kSleeping).store(1);
      seen.push_back(__atomic_load_n(each->ring->futex(), __ATOMIC_SEQ_CST));
    }
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const bool posted = std::any_of(rings.begin(), rings.end(),
                                    [](const auto& each) { return each->posted(); });
    if (!posted) {
      asleep_ = true;
      lock.unlock();
      wait_for_change(rings, seen);
      lock.lock();
      asleep_ = false;
    }
    for (const auto& each : rings) each->ring->store(kSleeping, 0, 0);
  }

  static void wait_for_change(const ServedRings& rings, const std::vector<uint32_t>& seen) {
    if (rings.size() > 1 && wait_for_any(rings, seen)) return;
    const timespec limit{0, rings.size() > 1 ? kSeveralLooks : kLenderLooks};
    syscall(SYS_futex, rings[0]->ring->futex(), FUTEX_WAIT, seen[0], &limit, nullptr, 0);
  }

  // False where the kernel, older than 5.16, does not have it or a sandbox forbids it.
  static bool wait_for_any(const ServedRings& rings, const std::vector<uint32_t>& seen) {
#if defined(SYS_futex_waitv) && defined(FUTEX_32)
    std::vector<futex_waitv> waiters(std::min<size_t>(rings.size(), FUTEX_WAITV_MAX));
    for (size_t i = 0; i < waiters.size(); ++i) {
      waiters[i] = {};
      waiters[i].val = seen[i];
      waiters[i].uaddr = reinterpret_cast<uintptr_t>(rings[i]->ring->futex());
      waiters[i].flags = FUTEX_32;
    }
    timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += kLenderLooks;
    if (until.tv_nsec >= 1'000'000'000) {
      until.tv_nsec -= 1'000'000'000;
      ++until.tv_sec;
    }
    const long woken = syscall(SYS_futex_waitv, waiters.data(), waiters.size(), 0, &until,
                               CLOCK_MONOTONIC);
    return woken >= 0 || errno == EAGAIN || errno == ETIMEDOUT || errno == EINTR;
#else
    return false;
#endif
  }

  const int64_t spin_ns_;
  // Guards all below and every call of vLLM's kernels here: they share one scratch pad.
  std::mutex mutex_;
  std::condition_variable awake_;
  std::optional<Attention> attention_;
  ServedRings rings_;
  int64_t looked_ = 0;
  bool asleep_ = false, stopped_ = false;
  // Written without the mutex, too, lest busy() wait for more than one service.
  std::atomic<bool> idle_{true};
  std::thread thread_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using at::Tensor;
  py::class_<Ring, std::shared_ptr<Ring>>(module, "Ring")
      .def(py::init<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>());
  py::class_<Borrower>(module, "Borrower")
      .def(py::init<std::shared_ptr<Ring>>())
      .def("post", &Borrower::post)
      .def("copy", &Borrower::copy)
      .def("wait", &Borrower::wait);
  py::class_<AttentionServer>(module, "AttentionServer")
      .def(py::init<int64_t>())
      .def("open", &AttentionServer::open)
      .def("close", &AttentionServer::close)
      .def("poll", &AttentionServer::poll)
      .def("busy", &AttentionServer::busy)
      .def("idle", &AttentionServer::idle)
      .def("stop", &AttentionServer::stop);
}

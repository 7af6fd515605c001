/* Stands for CUDA's driver where there is no GPU: its calls on virtual memory, on the host's. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500 };
enum { PAGE = 2 << 20, MOST_PAGES = 8, PINNED = 1, DEVICE = 1, READ_WRITE = 3 };

typedef unsigned long long u64;
typedef struct { int type, id; } Location;
typedef struct { int type, handles; Location location; } Kind;
typedef struct { Location location; int flags; } Access;

static int pages;

static int is_right(const Kind *kind) {
    return kind->type == PINNED && kind->location.type == DEVICE && kind->location.id == 0;
}

int cuMemGetAllocationGranularity(size_t *size, const Kind *kind, int least) {
    *size = PAGE;
    return is_right(kind) && least == 0 ? OK : INVALID;
}

int cuMemAddressReserve(u64 *address, size_t size, size_t aligned, u64 hint, u64 flags) {
    void *whole = mmap(NULL, size + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *address = ((u64)whole + PAGE - 1) / PAGE * PAGE;
    return size % PAGE || aligned || hint || flags ? INVALID : OK;
}

int cuMemCreate(u64 *handle, size_t size, const Kind *kind, u64 flags) {
    if (size != PAGE || flags || !is_right(kind))
        return INVALID;
    if (pages == MOST_PAGES)
        return OUT_OF_MEMORY;
    int file = memfd_create("page", 0);
    if (file < 0 || ftruncate(file, PAGE))
        return OUT_OF_MEMORY;
    pages++;
    *handle = file;
    return OK;
}

int cuMemMap(u64 address, size_t size, size_t offset, u64 handle, u64 flags) {
    if (address % PAGE || size != PAGE || offset || flags)
        return INVALID;
    void *at = mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handle, 0);
    return at == MAP_FAILED ? INVALID : OK;
}

int cuMemSetAccess(u64 address, size_t size, const Access *of, size_t count) {
    int right = count == 1 && of->flags == READ_WRITE && of->location.type == DEVICE;
    if (!right || of->location.id != 0 || size % PAGE)
        return INVALID;
    return mprotect((void *)address, size, PROT_READ | PROT_WRITE) ? INVALID : OK;
}

int cuMemUnmap(u64 address, size_t size) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    return mmap((void *)address, size, PROT_NONE, flags, -1, 0) == MAP_FAILED ? INVALID : OK;
}

int cuMemRelease(u64 handle) {
    pages--;
    return close(handle) ? INVALID : OK;
}

int cuMemAddressFree(u64 address, size_t size) {
    return munmap((void *)address, size) ? INVALID : OK;
}

/* Of this stand-in alone. */
int pages_that_exist(void) { return pages; }

int cuGetProcAddress_v2(const char *name, void **found, int version, u64 flags, int *status) {
    *found = dlsym(RTLD_DEFAULT, name);
    if (!*found) {
        void *here = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);
        *found = here ? dlsym(here, name) : NULL;
    }
    if (status)
        *status = *found ? 0 : 1;
    return *found ? OK : NOT_FOUND;
}

int cuGetProcAddress(const char *name, void **found, int version, u64 flags) {
    return cuGetProcAddress_v2(name, found, version, flags, NULL);
}

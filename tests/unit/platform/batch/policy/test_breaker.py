"""When a batch is stopped because engines end with its lines, and when it is cleared."""

from __future__ import annotations

from loomserve.platform.batch.policy.breaker import MOST_ENDS, CircuitBreaker


def test_it_opens_with_the_third_engine_that_ended_and_not_with_many_lines_of_one() -> None:
    breaker = CircuitBreaker()
    for number in range(50):
        breaker.ended("e1", number, "m", alone=False)
    assert not breaker.is_open
    breaker.ended("e2", 7, "m", alone=True)
    assert not breaker.is_open
    breaker.ended("e3", 7, "m", alone=True)
    assert breaker.is_open
    assert MOST_ENDS == 3


def test_ends_that_others_may_have_caused_lead_to_a_test_only() -> None:
    breaker = CircuitBreaker()
    for end in range(8):
        breaker.ended(f"e{end}", end, "m", alone=False)
    assert not breaker.is_open
    assert (breaker.is_testing("m"), breaker.most_engines("m")) == (True, 1)
    breaker.ended("f1", 5, "m", alone=True)
    assert breaker.is_open


def test_a_batch_is_cleared_of_an_end_when_all_its_lines_that_were_there_are_answered() -> None:
    breaker = CircuitBreaker()
    for number in (1, 2):
        breaker.ended("e1", number, "m", alone=False)
    breaker.answered(1, computed=True)
    assert (breaker.is_testing("m"), breaker.is_suspect(1)) == (True, False)
    breaker.answered(2, computed=True)
    assert not breaker.is_testing("m")
    # So ends that it only witnessed never add up.
    for end in range(10):
        breaker.ended(f"e{end + 2}", end, "m", alone=True)
        breaker.answered(end, computed=True)
    assert not breaker.is_open


def test_a_line_that_is_not_sent_again_holds_nobody_up_but_its_ends_count() -> None:
    breaker = CircuitBreaker()
    for killer in (1, 2):
        breaker.ended(f"e{killer}", killer, "m", alone=True)
        breaker.condemned(killer)
        assert not breaker.is_testing("m")
    breaker.ended("e3", 3, "m", alone=False)
    assert breaker.is_open


def test_only_lines_for_the_model_whose_engine_ended_wait() -> None:
    breaker = CircuitBreaker()
    breaker.ended("e1", 1, "m", alone=False)
    assert (breaker.is_testing("m"), breaker.is_testing("other")) == (True, False)


def test_no_more_engines_have_its_lines_than_may_end_until_it_is_known() -> None:
    breaker = CircuitBreaker()
    assert breaker.most_engines("m") == 1
    breaker.answered(1, computed=False)
    assert breaker.most_engines("m") == 1, "a refusal says nothing of what engines do with it"
    breaker.answered(2, computed=True)
    assert breaker.most_engines("m") is None
    breaker.ended("e1", 3, "m", alone=False)
    assert breaker.most_engines("m") == 2
    assert breaker.most_engines("other") is None
    breaker.ended("e2", 3, "m", alone=True)
    assert breaker.most_engines("m") == 1

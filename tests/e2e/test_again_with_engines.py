"""What other files ask of simulated engines, asked again of those that compute: what they listen
on, what a request can do to them, and how they die."""

import pytest

from tests.e2e.test_bad_input import (  # noqa: F401
    test_a_wrong_field_is_refused,
    test_two_hundred_connections_at_once_are_all_answered,
)
from tests.e2e.test_exposure import (  # noqa: F401
    test_another_user_opens_nothing_and_connects_to_nothing,
    test_every_process_asks_for_the_runs_own_token,
    test_nothing_listens_beyond_loopback,
    test_what_the_platform_makes_is_for_its_user_alone,
)
from tests.e2e.test_failures import (  # noqa: F401
    test_a_client_that_leaves_has_its_request_aborted_within_a_second,
    test_a_killed_only_engine_holds_its_stream_until_another_comes_and_not_for_ever,
    test_requests_of_a_model_survive_the_death_of_one_engine,
)
from tests.e2e.test_fuzz import (  # noqa: F401
    test_random_requests_find_no_fault,
    test_thousands_of_random_requests_find_no_fault,
)
from tests.e2e.test_request_costs import (  # noqa: F401
    same_engines,
    test_grammars_are_refused_or_answered_while_others_streams_go_on,
    test_no_mutation_of_a_valid_body_is_an_error_of_ours,
    test_numbers_that_are_none_are_never_an_error_of_ours,
)

pytestmark = pytest.mark.e2e

"""What is said of an application that does not start."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    DeploymentStatusTrigger,
)

from loomserve.deployments import apps

TRIED = """The deployment failed to start 3 times in a row. See the controller's logs. Error:
Traceback (most recent call last):
  File "listeners.py", line 1, in <module>
OSError: [Errno 98] Address already in use
"""


def failed(message: str) -> ApplicationStatusOverview:
    deployment = DeploymentStatusOverview(
        status=DeploymentStatus.DEPLOY_FAILED,
        status_trigger=DeploymentStatusTrigger.REPLICA_STARTUP_FAILED,
        replica_states={},
        message=message,
    )
    return ApplicationStatusOverview(
        status=ApplicationStatus.DEPLOY_FAILED,
        message="Failed to update the deployments ['Gateway'].",
        last_deployed_time_s=0,
        deployments={"Gateway": deployment},
    )


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (TRIED, "OSError: [Errno 98] Address already in use (more in /run/logs/serve)"),
        ("", "Failed to update the deployments ['Gateway']. (more in /run/logs/serve)"),
    ],
)
def test_a_failure_is_told_by_its_error_and_where_more_of_it_stands(
    message: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apps, "session_folder", lambda: Path("/run"))
    assert apps.why_failed(failed(message)) == said

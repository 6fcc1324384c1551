"""`atoll status` of a run that waits."""

import json

from support.commands import loaded_by


def test_status_and_rounds_of_a_run_that_waits(atoll, invite):
    status = json.loads(atoll("status", invite, "--json").out)
    assert (status["state"], status["run_id"]) == ("waiting", invite.run_id.hex())
    assert "waiting" in atoll("status", invite).out
    assert "no rounds committed yet" in atoll("rounds", invite).out
    assert json.loads(atoll("rounds", invite, "--json").out)["rounds"] == []


def test_status_loads_no_torch(invite):
    """Torch alone takes seconds; a script that asks for the status waits for none of them."""
    assert "torch" not in loaded_by("status", invite, "--json")

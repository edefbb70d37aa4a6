"""Ray's workers say what one process says, and listen to this machine only; `make test-all` runs this in .cache/ray."""

import sys
from importlib.util import find_spec

import pandas as pd
import pytest

from otb_analysis.errors import StoreError
from otb_analysis.store import aggregate as module
from otb_analysis.store.aggregate import aggregate, aggregate_on_ray, partitions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="no ray here; `make test-all` runs this in .cache/ray"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def seen(monkeypatch):
    """Return what Ray was at the end of its work: how many processors, and where its processes listened."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")  # as Ray has it on Linux
    found = []

    def looking(waiting, noun):
        import psutil

        yield from waiting
        if not sys.modules["ray"].is_initialized():
            return
        here = psutil.Process()
        processes = [here, *here.children(recursive=True)]
        sockets = [one for process in processes for one in process.net_connections("tcp")]
        listening = {one.laddr.ip.removeprefix("::ffff:") for one in sockets if one.status == psutil.CONN_LISTEN}
        found.append((sys.modules["ray"].cluster_resources()["CPU"], listening))

    with monkeypatch.context() as patched:
        patched.setattr(module, "counted", looking)
        yield found


def test_two_workers_say_what_one_process_says_and_listen_to_this_machine_only(runs, seen):
    found = partitions(runs, 2)
    on_ray = aggregate_on_ray(found, 2)
    assert seen == [(2, {"127.0.0.1"})]
    alone = aggregate(found)
    pd.testing.assert_frame_equal(on_ray, alone, rtol=1e-12)  # threads add in any order
    assert set(alone["run"]) == {"run-0", "run-1"} and set(alone["first_step"]) == {0, 2, 4}
    assert set(alone["column"]) == {"logprob", "energy_proxy", "grad_norm_sq", "reward"} and alone["n"].sum() > 250


def test_broken_part_is_the_sentence_of_one_process(runs, seen):
    found = partitions(runs, 2)
    (runs[1] / "tokens" / "part-00000003-r0.parquet").write_bytes(b"PAR1")
    with pytest.raises(StoreError, match=r"part-00000003-r0.parquet is broken") as alone:
        aggregate(found)
    with pytest.raises(StoreError) as on_ray:
        aggregate_on_ray(found, 2)
    assert str(on_ray.value) == str(alone.value) and seen == []

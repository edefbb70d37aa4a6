import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("two_processes.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What two processes that share a model through gloo found; the script asserts refusals and `.grad` itself."""
    folder = tmp_path_factory.mktemp("two")
    commands = [[sys.executable, str(SCRIPT), str(rank), str(folder)] for rank in range(2)]
    running = [subprocess.Popen(c, stderr=subprocess.PIPE, text=True) for c in commands]
    try:
        errors = [process.communicate(timeout=240)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [p.returncode for p in running] == [0, 0], "\n".join(errors)
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scope", ["all", r"layers\.1"])
def test_shards_of_a_sharded_model_add_up_to_the_whole_sketch_on_every_process(results, tied, scope):
    for found in results:
        whole = found[f"whole {tied} {scope}"]
        for name in ("shards", "again"):
            got = found[f"{name} {tied} {scope}"]
            np.testing.assert_allclose(got, whole, rtol=0, atol=2e-6 * np.abs(whole).max())


@pytest.mark.slow
def test_sketches_of_data_parallel_processes_add_up(results):
    # Process 0 has rollouts of clusters (4, 1), so has process 1; axis c is sorted, 1 before 4, in both.
    whole = results[0]["whole True all"]
    for name in ("ddp", "ddp again"):
        total = results[0][name] + results[1][name]
        np.testing.assert_allclose(total, whole, rtol=0, atol=2e-6 * np.abs(whole).max())


@pytest.mark.slow
def test_two_processes_have_the_gram_matrix_of_one(results):
    names = [key.removesuffix(" one") for key in results[0] if key.startswith("gram ") and key.endswith(" one")]
    assert len(names) == 27
    for found in results:
        for name in names:
            one, two = (found[f"{name} {who}"] for who in ("one", "two"))
            length = np.sqrt(np.einsum("mmpp->mp", one))
            allowed = 1e-6 * length[:, None, :, None] * length[None, :, None, :]
            assert (np.abs(two - one) <= allowed).all(), name
        np.testing.assert_allclose(found["gathered"], found["whole"], rtol=0, atol=2e-6 * np.abs(found["whole"]).max())


@pytest.mark.slow
def test_a_model_that_fsdp2_shards_is_measured_by_the_fast_engine(results):
    for found in results:
        np.testing.assert_allclose(found["norms deep two"], found["norms deep one"], rtol=1e-5)

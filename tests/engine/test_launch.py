"""How a rank's threads are told to wait and where to run."""

from __future__ import annotations

from pdserve.engine.launch import threads_environment


def test_threads_stay_on_their_cores_only_where_a_rank_has_them_all() -> None:
    assert threads_environment(4, num_cores=4)["OMP_PROC_BIND"] == "true"
    for num_threads in (1, 3, 8):
        assert "OMP_PROC_BIND" not in threads_environment(num_threads, num_cores=4)

from pdserve.bench.rounds import CASES, Case, Stopwatch, measure_rounds


def test_only_rounds_of_the_whole_batch_count_and_the_forward_does_not() -> None:
    stopwatch = Stopwatch()
    for batch_size in (1, 2, 2, 2, 1):
        stopwatch.begin_round(batch_size)
        stopwatch.pause()
        stopwatch.resume()
    assert len(stopwatch.rounds_s) == 4
    assert len(stopwatch.milliseconds(2)) == 2


def test_a_small_case_of_each_runner_is_measured() -> None:
    for case in (CASES[0], Case("small", 64, num_rounds=5)):
        times = measure_rounds(case, batch_size=1)
        assert 0 < times.p50_ms <= times.p99_ms

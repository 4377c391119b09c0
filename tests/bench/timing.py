"""How the GPU benchmarks measure: medians, CUDA graphs, slopes over layers."""

import statistics
import time
from collections.abc import Callable

import torch


def graph_us(launches: list[Callable[[], object]], repeats: int = 15) -> float:
    """Median time of one of `launches`, all captured in a CUDA graph, in us, by events."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / len(launches) * 1e3)
    return statistics.median(times[1:])


def host_us(step: Callable[[], object], wait: Callable[[], object], steps: int = 30) -> float:
    """Median over 7 rounds of the time of one of `steps` steps queued without waiting, in us."""
    times = []
    for _ in range(7):
        step()
        wait()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        times.append((time.perf_counter() - start) / steps * 1e6)
    return statistics.median(times)


def slope_us(time_of: Callable[[int], float], low: int = 24, high: int = 64) -> tuple[float, float]:
    """Time per layer and fixed time, from programs of `low` and `high` layers."""
    first, second = time_of(low), time_of(high)
    layer = (second - first) / (high - low)
    return layer, first - low * layer

"""Recorded traffic of any format as one stream of ``core.trace.TraceRow``: one file and one line of ``READERS`` per format."""

from ppd_bench.workload.traces.reader import ReadOptions
from ppd_bench.workload.traces.registry import READERS, open_trace
from ppd_bench.workload.traces.trace import Trace

__all__ = ["READERS", "ReadOptions", "Trace", "open_trace"]

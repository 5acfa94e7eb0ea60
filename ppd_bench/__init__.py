"""ppd-bench: measure how to split GPUs between prefill and decode, and where to prefill follow-up turns."""

__version__ = "0.1.0"

"""Run folders on disk: one record schema, atomic files, resume. Knows no formula.

``run_folder.RunFolder`` writes a run; ``read.read_records``, ``manifest.read_manifest`` and ``frames.read_frame`` read.
"""

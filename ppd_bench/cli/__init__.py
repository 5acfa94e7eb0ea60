"""Argument names, help, exit codes, terminal tables and progress bars. Everything else is imported when a verb runs."""

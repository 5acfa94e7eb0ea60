"""A sweep file: what it may say, the points it expands to, and what they would cost."""

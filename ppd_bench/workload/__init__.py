"""What traffic looks like: synthetic workloads, their files, and the conversations they yield."""

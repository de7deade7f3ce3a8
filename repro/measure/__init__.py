"""What is measured and how: memory, time, statistics, provenance, and what works on this machine."""

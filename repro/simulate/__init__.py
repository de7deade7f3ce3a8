"""The real step in shape only, at any scale: memory, communication, and what fits."""

"""One way to show things to people: a console, a table, numbers with their units, a layout in words.

It knows nothing but `repro.config`, so every room may use it; rich is imported when something is drawn.
"""

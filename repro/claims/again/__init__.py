"""Claims asked again of a machine of today: questions (`questions.toml`), and what simulations answer.

The answers are predictions and no verdicts: nobody published what they could be held against.  `report` and `cli`
import it.
"""

"""What the native engine's step is made of beside `parallel`: a rank's part of the model, the learning rate.

`engines` and `checkpoint` import it.
"""

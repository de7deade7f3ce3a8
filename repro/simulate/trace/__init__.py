"""One step of the real engine on `meta` tensors, as a list of events: who allocates, computes and sends what, in order.

`events` is the data, `recorder` follows a step, `shapes` remembers what operators return, `transport` carries messages
without data, `roles` traces one rank of each pipeline role. The other rooms of `simulate` and `calibrate` import it.
"""

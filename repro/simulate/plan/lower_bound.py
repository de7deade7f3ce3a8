"""Lower bounds of peak memory and step time without a trace, from the operators and collectives of one layer.

A forward and a backward pass of one chunk take f and b seconds. The time T of a step of m micro-batches on p stages of
v chunks has the lower bound (2104.04473 sec. 2.2 has this sum for equal stages)

    T  >=  (p - 1) f  +  m v (f + b) of the last stage  +  (p - 1) b

Collectives of r seconds that overlap compute of s seconds delay it by a share c of their time: max(s + c r, r) is a
lower bound of both. It holds for each pass during which a stage gathers parameters, reduces gradients or sums over tp,
and for the full step. Other operators, latencies, the host and the update only add to these.
"""

from __future__ import annotations

from math import prod

from repro.config import Layout, Model
from repro.config.layout import ELEMENT_BYTES, SELECTIVE
from repro.parallel.pipeline.schedule import peak_in_flight
from repro.simulate.plan.closed_form import FIRST, LAST, stage_parameters, state_bytes
from repro.simulate.time.device import ATTENTION, DeviceCost
from repro.simulate.time.network import Network
from repro.simulate.trace.events import Operator

Shape = tuple[int, ...]


class LayerWork:
    """Operators and awaited collectives of one layer, on one rank and for one micro-batch."""

    def __init__(self, model: Model, layout: Layout, seq: int):
        self.model, self.layout = model, layout
        self.bytes = ELEMENT_BYTES[layout.precision]
        self.tokens = layout.micro_batch * seq // layout.cp
        """Number of tokens of a micro-batch that a rank processes."""
        self.stream = self.tokens * model.hidden // (layout.tp if layout.sp else 1)
        """Number of elements of a rank's residual stream, which sequence parallelism splits over tp."""
        self.seq = seq
        self.sums = 2 if model.blocks == "sequential" else 1
        """Number of sums over the tp group in a layer's forward pass, which equals the number of residual additions."""
        self.norms = 1 if model.blocks == "parallel-one-norm" else 2

    def forward(self) -> list[Operator]:
        """Return the operators of a layer's forward pass."""
        units = self.model.mlp_matrices
        passes = [self._pass(self.stream, 2)] * self.norms + [self._pass(self.stream, 3)] * self.sums
        products = [self._product(self.tokens, width, depth) for depth, width in self._matrices()]
        copies = self._copies(self.norms, self.sums)
        return [*passes, self._pass(self._ffn, units), *products, *self._attention(1.0, 2), *copies]

    def backward(self) -> list[Operator]:
        """Return the operators of a layer's backward pass, including recomputed attention."""
        model, (queries, keys) = self.model, self._widths()
        units = 2 * model.mlp_matrices - 1
        additions = self.sums if self.sums > 1 else 0
        joined = keys if model.key_heads < model.heads else queries + keys
        passes = [self._pass(self.stream, 3)] * (self.norms + additions)
        passes += [self._pass(self.tokens * joined, 2), self._pass(self._ffn, units)]
        passes += [self._pass(self.tokens * (queries + keys), 1)] * (model.biases != "none")
        passes += [self._pass(self.stream, 1)] * (self.sums * (model.biases == "all"))
        products = [product for depth, width in self._matrices() for product in self._gradients(depth, width)]
        copies = self._copies(self.sums + self.norms, self.norms)
        again = self._attention(1.0, 2) if self.layout.recompute == SELECTIVE else []
        return [*passes, *products, *self._attention(2.5, 4), *again, *copies]

    def head(self) -> list[Operator]:
        """Return the operators that compute the logits and the loss, and those of their backward pass."""
        vocab, hidden = self.model.vocab // self.layout.tp, self.model.hidden
        loss, product = self._pass(self.tokens * vocab, 2), self._product(self.tokens, vocab, hidden)
        return [loss, product, loss, *self._gradients(hidden, vocab)]

    def retained(self) -> float:
        """Return the bytes of activations that a layer's forward pass retains for the backward pass without
        checkpoints.

        Norms retain inputs and outputs; attention its queries, keys, values and output; the MLP each of its products.
        """
        model, layout = self.model, self.layout
        streams = self.norms + (self.norms if model.blocks == "sequential" else 1)
        queries, keys = self._widths()
        writes = layout.kernels.writes_scores and layout.recompute != SELECTIVE
        scores = layout.micro_batch * model.heads // layout.tp * self.seq**2 if writes else 0
        return self.bytes * (
            streams * self.stream
            + self.tokens * (2 * queries + keys)
            + model.mlp_matrices * self._ffn
            + scores
        )

    def checkpoint(self) -> float:
        """Return the bytes of a layer's activation checkpoint in device memory."""
        layout = self.layout
        return 0.0 if layout.pa_cpu else self.bytes * self.stream / (layout.tp if layout.pa else 1)

    def logits(self) -> int:
        """Return the bytes of the logits of one micro-batch on one rank."""
        return self.bytes * self.tokens * self.model.vocab // self.layout.tp

    def tensor_seconds(self, network: Network) -> tuple[float, float, float]:
        """Return the seconds of a layer's tp and cp collectives: awaited in forward, awaited or hidden in backward."""
        model, layout = self.model, self.layout
        forward = backward = others = 0.0
        if layout.tp > 1:
            payload = self.bytes * self.tokens * model.hidden
            reduced = network.seconds("reduce_scatter" if layout.sp else "all_reduce", "tp", payload)
            gathered = network.seconds("all_gather", "tp", payload) if layout.sp else 0.0
            forward, backward = self.sums * reduced + self.norms * gathered, self.sums * gathered
            others = self.norms * (reduced + gathered)
        if layout.cp > 1:
            payload = self.bytes * self.tokens * layout.cp * self._widths()[1]
            keys = network.seconds("all_gather", "cp", payload)
            forward, backward = forward + keys, backward + keys
        return forward, backward, others

    def buckets(self) -> tuple[int, float]:
        """Return a lower bound of the number of gradient buckets per layer, and the maximum bytes of a bucket.

        A parameter of more than `bucket_bytes` has a bucket of its own. Stage 3 has at least one bucket for each layer.
        """
        sizes, limit = self.gradient_bytes(), self.layout.bucket_bytes
        if self.layout.zero == 3:
            return 1, sum(sizes)
        if not self.layout.cb:  # Without C_B (constant-size buffers), all layers share one gradient bucket.
            return 0, float("inf")
        return sum(size > limit for size in sizes), max(limit, *sizes)

    def matrix_bytes(self) -> list[int]:
        """Return the bytes of each weight matrix of a layer on one rank."""
        return [self.bytes * depth * width for depth, width in self._matrices()]

    def gradient_bytes(self) -> list[int]:
        """Return the bytes of the accumulated gradient of each weight matrix of a layer on one rank."""
        return [self.layout.grad_bytes * depth * width for depth, width in self._matrices()]

    @property
    def _ffn(self) -> int:
        return self.tokens * self.model.ffn_width // self.layout.tp

    def _widths(self) -> tuple[int, int]:
        """Return the number of columns of the queries, and of the keys and values together, on one rank."""
        model, tp = self.model, self.layout.tp
        return model.heads * model.head_width // tp, 2 * max(1, model.key_heads // tp) * model.head_width

    def _matrices(self) -> list[tuple[int, int]]:
        """Return the sizes (input, output) of a layer's weight matrices on one rank."""
        model, ffn, (inner, keys) = self.model, self.model.ffn_width // self.layout.tp, self._widths()
        hidden, grouped = model.hidden, model.key_heads < model.heads
        queries = [(hidden, inner), (hidden, keys)] if grouped else [(hidden, inner + keys)]
        return [*queries, (inner, hidden), (hidden, (model.mlp_matrices - 1) * ffn), (ffn, hidden)]

    def _copies(self, gathers: int, scatters: int) -> list[Operator]:
        """Return the copy operators of sequence parallelism's collectives; empty for micro-batches of one sample."""
        if not self.layout.sp or self.layout.micro_batch == 1:
            return []
        elements = self.tokens * self.model.hidden
        return [
            *[self._pass(elements, 2, "aten.copy_")] * gathers,
            *[self._pass(elements, 2, "aten.clone")] * scatters,
        ]

    def _attention(self, flash: float, batched: int) -> list[Operator]:
        """Return attention as one fused operator of `flash` times the forward FLOP, or as `batched` matrix products."""
        model, layout = self.model, self.layout
        heads, width = model.heads // layout.tp, model.head_width
        if layout.kernels.writes_scores:
            return [self._product(self.seq, self.seq, width, layout.micro_batch * heads)] * batched
        queries = (layout.micro_batch, heads, self.seq, width)
        flops = round(flash * 4 * prod(queries) * self.seq / layout.cp)
        return [Operator(f"{ATTENTION}flash_attention", flops, 0, 0, (queries, queries, queries), self.bytes)]

    def _gradients(self, depth: int, width: int) -> tuple[Operator, Operator]:
        """Return the two matrix products of a linear layer's backward pass: gradients of its input and its weights."""
        return self._product(self.tokens, depth, width), self._product(depth, width, self.tokens)

    def _product(self, rows: int, columns: int, depth: int, batch: int = 0) -> Operator:
        first: Shape = (batch,) if batch else ()
        left, right, result = (*first, rows, depth), (*first, depth, columns), (*first, rows, columns)
        read, written = self.bytes * (prod(left) + prod(right)), self.bytes * prod(result)
        name = "aten.bmm" if batch else "aten.mm"
        return Operator(name, 2 * depth * prod(result), read, written, (left, right), self.bytes)

    def _pass(self, elements: int, times: int, name: str = "repro.elementwise") -> Operator:
        """Return an element-wise operator that transfers `times` x `elements` elements to or from memory."""
        return Operator(name, 0, self.bytes * elements * times, 0, (), self.bytes)


def memory_lower_bound(model: Model, layout: Layout, seq: int) -> dict[str, dict[str, float]]:
    """Return lower bounds in bytes of the peak memory of each pipeline role, by category.

    The bound is the memory before a pipeline stage's first backward pass: model states, activations of micro-batches in
    flight, and logits. ZeRO stage 3 then adds gathered parameters of two layers and the gradients of one layer.
    """
    work = LayerWork(model, layout, seq)
    layers = model.layers // (layout.pp * layout.chunks)
    # A layer's checkpoint is its input, so recomputation adds all other retained activations.
    again = work.retained() - work.bytes * work.stream
    found = {}
    for role, parameters in stage_parameters(model, layout).items():
        stage = layout.pp - 1 if role == LAST else 0
        passes = peak_in_flight(layout.schedule, stage, layout.pp, layout.accumulation, layout.chunks)
        logits = 0.0 if role == FIRST else work.logits()
        found[role] = state_bytes(parameters, layout)
        if layout.zero == 3 and layout.copies > 1 and layout.zero3_gather == "block":
            found[role]["other"] = min(2, layers) * sum(work.matrix_bytes()) + sum(work.gradient_bytes())
            logits = max(0.0, logits - found[role]["other"])
        if layout.has_checkpoints:
            found[role]["activations"] = max(again, logits)
            found[role]["checkpoints"] = passes * layers * work.checkpoint()
        else:
            found[role]["activations"] = passes * layers * work.retained() + logits
    return found


def step_time_lower_bound(
    model: Model, layout: Layout, seq: int, cost: DeviceCost, network: Network
) -> float:
    """Return a lower bound of a step's seconds; 0 for a system with measured times (`repro calibrate`)."""
    if cost.rates or cost.system.provenance is not None:
        return 0.0
    work, m, others = LayerWork(model, layout, seq), layout.accumulation, layout.pp - 1
    layers = model.layers // (layout.pp * layout.chunks)
    head = sum(map(cost.seconds, work.head()))
    awaited_forward, awaited_backward, overlapped = work.tensor_seconds(network)
    once = sum(map(cost.seconds, work.forward())) + awaited_forward
    forward = layers * once
    backward = layers * (sum(map(cost.seconds, work.backward())) + awaited_backward)
    if layout.has_checkpoints:
        backward += layers * once
    overlapped *= layers
    gathers, reductions, awaited = _data_parallel_seconds(work, network)
    reduced, gathered = (
        times * layout.chunks * seconds
        for times, seconds in zip(_messages_in_step(layout), (reductions, gathers), strict=True)
    )

    def with_collectives(seconds: float, *collectives: float) -> float:
        return max(seconds + network.overlap_cost * max(collectives), *collectives)

    usual = with_collectives(backward, overlapped)
    reducing = with_collectives(backward, overlapped, awaited)
    last = with_collectives(backward, overlapped, 0.0 if layout.zero == 3 else reductions)
    passes = layout.chunks * m
    reducing_passes = others + (passes if layout.zero == 2 else layout.chunks)
    before = others * forward
    if layout.zero in (1, 2):
        before += with_collectives(forward, gathers) - forward
    busy = m * head + passes * (forward + backward)
    path = m * head + passes * (forward + usual) + others * usual + last - usual
    return max(
        before + path + (reducing_passes - 1) * (reducing - usual),
        with_collectives(busy, passes * overlapped, reduced + gathered),
        before + reduced,
    )


def _data_parallel_seconds(work: LayerWork, network: Network) -> tuple[float, float, float]:
    """Return lower bounds of the seconds of data-parallel collectives per chunk of layers.

    The values are those of parameter gathers, of gradient reductions, and of the reductions that a backward pass
    awaits. A backward pass of ZeRO stages 1 and 2 awaits the reductions of all but its last two buckets.
    """
    layout, (count, largest) = work.layout, work.buckets()
    layers = work.model.layers // (layout.pp * layout.chunks)
    matrices, gradients = layers * sum(work.matrix_bytes()), layers * sum(work.gradient_bytes())
    op = "reduce_scatter" if layout.zero and layout.zero1_reduce == "reduce-scatter" else "all_reduce"

    def least(op: str, size: float, messages: int) -> float:
        return network.least_seconds(op, "dp", size, max(1, messages)) if size > 0 else 0.0

    awaits = layout.zero == 2 or (layout.zero == 1 and layout.overlap)
    return (
        least("all_gather", matrices, count * layers),
        least(op, gradients, count * layers),
        least(op, gradients - 2 * largest, count * layers - 2) if awaits else 0.0,
    )


def _messages_in_step(layout: Layout) -> tuple[int, int]:
    """Return the numbers of times that a step reduces all gradients of a rank and gathers all parameters of the rank.

    The numbers are those of 1910.02054 sec. 7. If ZeRO stage 3 gathers single parameters, it retains an
    unknown part of them between uses. The second number is then 0, a lower bound.
    """
    m = layout.accumulation
    in_blocks = layout.zero3_gather == "block"
    return {0: (1, 0), 1: (1, 1), 2: (m, 1), 3: (m, 2 * m * in_blocks)}[layout.zero]


def sent_bytes_lower_bound(model: Model, layout: Layout, seq: int) -> dict[str, float]:
    """Return lower bounds of the bytes that a rank of the last stage sends over tp and over dp in a step."""
    work, (reductions, gathers) = LayerWork(model, layout, seq), _messages_in_step(layout)
    # A layer sums outputs, gradients of inputs and recomputed outputs over the tp group.
    sums = work.sums * (2 + layout.has_checkpoints)
    payload = layout.accumulation * model.layers // layout.pp * work.bytes * work.tokens * model.hidden
    parameters = list(stage_parameters(model, layout).values())[-1]
    per_parameter = gathers * work.bytes + reductions * (2 - (layout.zero > 0)) * layout.grad_bytes
    return {
        "tp": sums * 2 * (layout.tp - 1) / layout.tp * payload,
        "dp": per_parameter * (layout.copies - 1) / layout.copies * parameters,
    }

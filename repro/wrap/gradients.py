"""Gradients of a wrapped module: `p.grad` for clipping and logging, and support of `torch.amp.GradScaler`.

After the last backward pass of a step, `p.grad` is the mean over all ranks. Under stage 0 `p.grad` is a plain view of
its bucket, as in DistributedDataParallel, and under stages 1 to 3 a `ShardedGradient`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from repro.parallel.comm import MAX, SUM, Group
from repro.parallel.zero.stage3_checks import METADATA_FUNCTIONS
from repro.parallel.zero.stages import ShardedModule
from repro.wrap.state_dicts import Shard


class ShardedGradient(Tensor):
    """Gradient of a parameter under ZeRO stages 1 to 3: the full shape, but only this rank's elements.

    It computes norms of the full gradient and supports in-place changes of single elements, as `clip_grad_norm_` and
    `clip_grad_value_` of torch need them. It refuses all other operators.
    """

    piece: Tensor
    number: int
    norms: GradientNorms

    @staticmethod
    def create(shape: torch.Size, piece: Tensor, number: int, norms: GradientNorms) -> ShardedGradient:
        """Return a sharded gradient of full `shape`. `piece`: this rank's elements [k]. `number`: parameter index."""
        gradient: ShardedGradient = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            ShardedGradient, shape, dtype=piece.dtype, device=piece.device
        )
        gradient.piece, gradient.number, gradient.norms = piece, number, norms
        return gradient

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedGradient({list(self.shape)}, {self.piece.numel()} elements on this rank)"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA_FUNCTIONS or func is torch._has_compatible_shallow_copy_type:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if func in UNCHANGED_FUNCTIONS:
            return first
        if func == Tensor.data.__set__ and args[1] is first:  # type: ignore[attr-defined]
            return None
        name = getattr(func, "__name__", str(func))
        if isinstance(first, ShardedGradient):
            if func in NORM_FUNCTIONS:
                order = kwargs.get("ord", kwargs.get("p", args[1] if len(args) > 1 else 2))
                is_total_norm = all(kwargs[k] in (None, False) for k in kwargs.keys() - {"ord", "p"})
                if is_total_norm and len(args) < 3:
                    return first.norms.compute(order)[first.number]
            elif name in ELEMENTWISE_FUNCTIONS and not _has_tensors([*args[1:], *kwargs.values()]):
                first.norms.prepare_change()
                func(first.piece, *args[1:], **kwargs)
                return first
        raise RuntimeError(
            f"{name}() of a gradient of shape {list(_shape(args))} is not supported under zero = 1 to 3, or before the "
            "last backward pass of a step. Use norm(), clip_grad_norm_, clip_grad_value_, scaling and clamping in "
            "place, or zero = 0."
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(
            "A backward pass without a forward pass of the wrapped module is not supported. Call the module itself, "
            "and compute the loss from its output."
        )


UNCHANGED_FUNCTIONS = {
    *(Tensor.detach, Tensor.data.__get__, Tensor.requires_grad_),  # type: ignore[attr-defined]
    *(Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16),
}
"""Tensor methods that return a sharded gradient unchanged. Casts have no effect: norms are in fp32 or fp64 anyway."""

NORM_FUNCTIONS = {torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm}
ELEMENTWISE_FUNCTIONS = {
    "mul_",
    "div_",
    "neg_",
    "zero_",
    "clamp_",
    "clamp_min_",
    "clamp_max_",
    "clip_",
    "nan_to_num_",
}
"""Names of element-wise in-place functions, which each rank can apply to its own piece of a gradient."""


def _has_tensors(values: Iterable[Any]) -> bool:
    return any(isinstance(value, Tensor) and value.dim() > 0 for value in values)


def _shape(values: Iterable[Any]) -> tuple[int, ...]:
    return next((tuple(v.shape) for v in values if isinstance(v, ShardedGradient)), ())


class GradientNorms:
    """Norms of the gradients of all parameters, computed from the pieces of all ranks with one all-reduce."""

    def __init__(
        self,
        pieces: dict[int, Tensor],
        gradients: int,
        group: Group | None,
        like: Tensor,
        reduce: Callable[[], None],
    ):
        """Prepare the norms of `gradients` gradients, of which this rank has the pieces `pieces[i]`.

        `group`: ranks that have the other pieces; None if each rank has full gradients. `like`: a tensor with the dtype
        and device of the norms. `reduce` completes the reduction of gradients over the ranks before their first use.
        """
        self._pieces, self._gradients, self._group, self._like = pieces, gradients, group, like
        self._reduce = reduce
        self._found: dict[float, Tensor] = {}

    def reset(self) -> None:
        """Discard the cached gradient norms after the gradients have changed."""
        self._found.clear()

    def prepare_change(self) -> None:
        """Reduce the gradients over all ranks, which must call this method, and discard the cached norms."""
        self._reduce()
        self.reset()

    def compute(self, order: Any) -> Tensor:
        """Return the `order`-norm of each parameter's full gradient, 1-D; a collective after gradients have changed."""
        order = 2.0 if order in (None, "fro") else float(order)
        if order not in self._found:
            if order <= 0:
                raise ValueError(f"norm of order {order}: must be positive or inf under zero = 1 to 3.")
            largest = order == float("inf")
            pieces = self._pieces.values()
            self._reduce()
            norms = [torch.linalg.vector_norm(piece, order, dtype=self._like.dtype) for piece in pieces]
            total = self._like.new_zeros(self._gradients)
            if norms:
                mine = torch.stack(norms)
                total[list(self._pieces)] = mine if largest else mine.pow(order)
            if self._group is not None:
                self._group.all_reduce(total, MAX if largest else SUM, purpose="norm").wait()
            self._found[order] = total if largest else total.pow(1 / order)
        return self._found[order]


class UserGradients:
    """Set `p.grad` of the module's parameters after a backward pass, and detect gradients that the user replaced."""

    def __init__(self, sharded: ShardedModule, pieces: dict[int, Tensor]):
        """Create the values of `p.grad`. `pieces[i]`: this rank's piece of the gradient of parameter `i`, if any."""
        self.parameters, self.names = sharded.parameters, sharded.names
        stage, group = sharded.sharding.stage, sharded.sharding.group
        dtype = torch.float64 if torch.float64 in {p.dtype for p in self.parameters} else torch.float32
        like = torch.zeros((), dtype=dtype, device=sharded.sharding.device)
        self.norms = GradientNorms(
            pieces, len(self.parameters), group if stage else None, like, sharded.reducer.reduce_early
        )
        self._pieces: list[Tensor] = []
        """Values of `p.grad` before the gradients are reduced over the ranks; under stages 1 to 3 also afterwards."""
        for i, shape in enumerate(sharded.shapes):
            piece = pieces.get(i, like.new_empty(0, dtype=self.parameters[i].dtype))
            self._pieces.append(ShardedGradient.create(shape, piece, i, self.norms))
        self._views = self._pieces
        if not stage:
            self._views = [pieces[i].view(shape) for i, shape in enumerate(sharded.shapes)]
        self._shown: list[Tensor] | None = None

    def show(self, reduced: bool) -> None:
        """Set `p.grad` after a backward pass. Unless `reduced`, the first use of a gradient reduces all gradients."""
        self._shown = self._views if reduced else self._pieces
        self._set(self._shown)

    def hide(self) -> None:
        """Set `p.grad` to None before a backward pass."""
        if self._shown is not None:
            self._set([None] * len(self._shown))
            self._shown = None

    def _set(self, gradients: Sequence[Tensor | None]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
        self.norms.reset()

    def check(self) -> None:
        """Raise `RuntimeError` if the user has replaced `p.grad`, because the step would ignore the replacement."""
        with torch._C.DisableTorchFunctionSubclass():
            shown: Sequence[Tensor | None] = self._shown or [None] * len(self.names)
            for name, parameter, gradient in zip(self.names, self.parameters, shown, strict=True):
                if parameter.grad is not gradient:
                    raise RuntimeError(
                        f"{name}.grad: replacing or removing a gradient is not supported. Change the gradient in place "
                        "(p.grad.mul_(...)), and call backward() on the loss."
                    )


class OptimizerGradient(Tensor):
    """Placeholder for `grad` of the optimizer's first parameter before a step, which supports `GradScaler` only.

    `torch.amp.GradScaler` divides the optimizer's gradients by the loss scale and detects inf and nan, but a rank has
    only pieces of the gradients. The placeholder implements the scaler's operator for the pieces of all ranks, as
    `DTensor` does for FSDP2.
    """

    unscale: Callable[[Tensor, Tensor], None]

    @staticmethod
    def create(parameter: Tensor, unscale: Callable[[Tensor, Tensor], None]) -> OptimizerGradient:
        """Return a placeholder for `parameter.grad`, whose `unscale(found_inf, inv_scale)` `GradScaler` calls."""
        made: OptimizerGradient = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            OptimizerGradient, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        made.unscale = unscale
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in METADATA_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            (own,), found_inf, inv_scale = args
            return own.unscale(found_inf, inv_scale)
        return cls.__torch_dispatch__(func, types)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(
            f"{getattr(func, '__name__', func)}() of a gradient in optimizer.param_groups is not supported. "
            "Use module.parameters(), as in clip_grad_norm_(module.parameters(), ...)."
        )


class GradScalerSupport:
    """Support of `torch.amp.GradScaler` for sharded gradients: all ranks skip a step if one rank has an overflow."""

    def __init__(self, shards: Sequence[Shard], group: Group | None, prepare_change: Callable[[], None]):
        """Create the gradient placeholder of the first of `shards`, through which `GradScaler` divides all gradients.

        `group`: ranks that have the other pieces of the gradients; None if each rank has full gradients.
        `prepare_change` is called before the division.
        """
        self._group, self._prepare_change = group, prepare_change
        self._of_dtype: dict[torch.dtype, list[Tensor]] = {}
        for shard in shards:
            self._of_dtype.setdefault(shard.gradient.dtype, []).append(shard.gradient)
        self._first = shards[0].parameter
        self._gradient = OptimizerGradient.create(self._first, self._unscale)

    def show(self) -> None:
        """Set the optimizer's gradient placeholder for `GradScaler` after a backward pass."""
        self._first.grad = self._gradient

    def hide(self) -> None:
        """Remove the optimizer's gradient placeholder for `GradScaler`."""
        self._first.grad = None

    def _unscale(self, found_inf: Tensor, inv_scale: Tensor) -> None:
        if torch.float16 in self._of_dtype:
            raise ValueError(
                "GradScaler with fp16 gradients is not supported. Leave the module in fp32 and use autocast."
            )
        self._prepare_change()
        for gradients in self._of_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)
        if self._group is not None:
            self._group.all_reduce(found_inf, MAX, purpose="overflow").wait()

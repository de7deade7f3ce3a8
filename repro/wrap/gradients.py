"""`p.grad` of a wrapped module after a step's last backward pass: the mean over all ranks, for clipping and logging.

Under stage 0 it is a plain view, as in DistributedDataParallel.  Under stages 1 to 3 a rank has a piece of it, or
nothing: a `ShardedGradient` answers with the norm of the whole, takes in-place changes of single elements, and
refuses what would need the rest.  `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` need no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from repro.parallel.comm import MAX, SUM, Group
from repro.parallel.zero.stage3_checks import METADATA_FUNCTIONS
from repro.parallel.zero.stages import ShardedModule


class ShardedGradient(Tensor):
    """The gradient of a parameter: its shape, dtype and device, and this rank's piece [k] of its elements."""

    piece: Tensor
    number: int
    norms: Norms

    @staticmethod
    def of(shape: torch.Size, piece: Tensor, number: int, norms: Norms) -> ShardedGradient:
        """`number`: its place among the gradients that `norms` knows."""
        gradient = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            ShardedGradient, shape, dtype=piece.dtype, device=piece.device
        )
        gradient.piece, gradient.number, gradient.norms = piece, number, norms
        found: ShardedGradient = gradient
        return found

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
        if func in SAME:
            return first
        if func == Tensor.data.__set__ and args[1] is first:  # type: ignore[attr-defined]
            return None
        name = getattr(func, "__name__", str(func))
        if isinstance(first, ShardedGradient):
            if func in NORMS:
                order = kwargs.get("ord", kwargs.get("p", args[1] if len(args) > 1 else 2))
                whole = all(kwargs[k] in (None, False) for k in kwargs.keys() - {"ord", "p"})
                if whole and len(args) < 3:
                    return first.norms.of(order)[first.number]
            elif name in ELEMENTWISE and not _others([*args[1:], *kwargs.values()]):
                first.norms.before_change()
                func(first.piece, *args[1:], **kwargs)
                return first
        raise RuntimeError(
            f"{name}() of a gradient {list(_shape(args))}: under zero = 1 to 3 a rank has a piece of it only. It takes "
            "norm(), clip_grad_norm_, clip_grad_value_ and, in place, scaling and clamping; zero = 0 has all of it "
            "once the backward passes are over that layout.accumulation or no_sync() speak of"
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(
            "a backward pass without a forward pass of the wrapped module: its gradients would meet those of the "
            "last step; call the module itself, and compute the loss from what it returns"
        )


SAME = {
    *(Tensor.detach, Tensor.data.__get__, Tensor.requires_grad_),  # type: ignore[attr-defined]
    *(Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16),
}
"""What leaves it as it is: norms are fp32 wherever it lies, and of a module that is cast the next pass complains."""

NORMS = {torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm}
ELEMENTWISE = {"mul_", "div_", "neg_", "zero_", "clamp_", "clamp_min_", "clamp_max_", "clip_", "nan_to_num_"}
"""What changes each element by itself, and keeps zero padding out of sight."""


def _others(values: Iterable[Any]) -> bool:
    return any(isinstance(value, Tensor) and value.dim() > 0 for value in values)


def _shape(values: Iterable[Any]) -> tuple[int, ...]:
    return next((tuple(v.shape) for v in values if isinstance(v, ShardedGradient)), ())


class Norms:
    """Norms of all gradients, from every rank's pieces in one all-reduce."""

    def __init__(
        self,
        pieces: dict[int, Tensor],
        gradients: int,
        group: Group | None,
        like: Tensor,
        settle: Callable[[], None],
    ):
        """`group`: the ranks that have other pieces, if any; `like`: a tensor of the norms' device and dtype.

        `settle` is called before gradients are looked at or changed: they may be this rank's own until then.
        """
        self._pieces, self._gradients, self._group, self._like = pieces, gradients, group, like
        self._settle = settle
        self._found: dict[float, Tensor] = {}

    def forget(self) -> None:
        """Gradients have changed."""
        self._found.clear()

    def before_change(self) -> None:
        """Gradients, which all ranks change alike, are reduced before."""
        self._settle()
        self.forget()

    def of(self, order: Any) -> Tensor:
        """The `order`-norm of each gradient [gradients]; the first call after a change is made by all ranks."""
        order = 2.0 if order in (None, "fro") else float(order)
        if order not in self._found:
            if order <= 0:
                raise ValueError(f"norm of order {order}: a positive number or inf under zero = 1 to 3")
            largest = order == float("inf")
            pieces = self._pieces.values()
            self._settle()
            norms = [torch.linalg.vector_norm(piece, order, dtype=self._like.dtype) for piece in pieces]
            total = self._like.new_zeros(self._gradients)
            if norms:
                mine = torch.stack(norms)
                total[list(self._pieces)] = mine if largest else mine.pow(order)
            if self._group is not None:
                self._group.all_reduce(total, MAX if largest else SUM, purpose="norm").wait()
            self._found[order] = total if largest else total.pow(1 / order)
        return self._found[order]


class UsersGradients:
    """Puts what a step's backward passes left at `p.grad`, and knows whether it is still there."""

    def __init__(self, sharded: ShardedModule, pieces: dict[int, Tensor]):
        """`pieces[i]`: this rank's piece of the gradient of parameter `i`; it may have none."""
        self.parameters, self.names = sharded.parameters, sharded.names
        stage, group = sharded.sharding.stage, sharded.sharding.group
        dtype = torch.float64 if torch.float64 in {p.dtype for p in self.parameters} else torch.float32
        like = torch.zeros((), dtype=dtype, device=sharded.sharding.device)
        self.norms = Norms(
            pieces, len(self.parameters), group if stage else None, like, sharded.reducer.reduce_early
        )
        self._pieces: list[Tensor] = []
        """What is shown until gradients are reduced, and under stages 1 to 3 afterwards too."""
        for i, shape in enumerate(sharded.shapes):
            piece = pieces.get(i, like.new_empty(0, dtype=self.parameters[i].dtype))
            self._pieces.append(ShardedGradient.of(shape, piece, i, self.norms))
        self._views = self._pieces
        if not stage:
            self._views = [pieces[i].view(shape) for i, shape in enumerate(sharded.shapes)]
        self._shown: list[Tensor] | None = None

    def show(self, reduced: bool) -> None:
        """A backward pass is over; unless `reduced`, the first look at the gradients reduces them."""
        self._shown = self._views if reduced else self._pieces
        self._set(self._shown)

    def hide(self) -> None:
        """A backward pass comes, which must find none."""
        if self._shown is not None:
            self._set([None] * len(self._shown))
            self._shown = None

    def _set(self, gradients: Sequence[Tensor | None]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
        self.norms.forget()

    def check(self) -> None:
        """Raise `RuntimeError` if somebody has put other gradients there, which no rank would see."""
        with torch._C.DisableTorchFunctionSubclass():
            shown: Sequence[Tensor | None] = self._shown or [None] * len(self.names)
            for name, parameter, gradient in zip(self.names, self.parameters, shown, strict=True):
                if parameter.grad is not gradient:
                    raise RuntimeError(
                        f"{name}.grad: was replaced or removed, but the step uses what the backward pass has reduced "
                        "over all ranks; change it in place (p.grad.mul_(...)), and call backward() on the loss"
                    )

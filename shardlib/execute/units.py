"""A unit at run time: its buckets, their nodes in the graph, and the whole parameters while they are gathered.

Two autograd functions make up a unit's pair. `_Root` makes, once per micro-batch, a tensor without memory that
stands for the bucket's whole gradient; its backward hands the complete gradient to `Gradients`, which reduces it.
`_Attach` connects gathered data to that root, each time the bucket is gathered; its backward packs the leaves'
gradients. Autograd sums the gradients of several gathers, and runs the root's backward when the sum is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch

from shardlib.collectives.styles.slices import Slices
from shardlib.common._compat import run_first, version_of, without_func
from shardlib.common.boundaries import refuse_compiled
from shardlib.errors import LossError
from shardlib.execute.gradients import Gradients
from shardlib.execute.handles import Handle, used_elsewhere
from shardlib.execute.slicing import SlicedHandle
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport.activity import naming
from shardlib.plan.buckets import Bucket
from shardlib.plan.exchanges import Routes
from shardlib.plan.placement import Placement
from shardlib.sharded.gather import Gather
from shardlib.sharded.params_on_disk import BufferOnDisk


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, state: BucketState) -> torch.Tensor:
        ctx.state = state
        ctx.set_materialize_grads(False)
        return anchor.detach().expand(state.bucket.size(0))

    @staticmethod
    def backward(ctx: Any, whole: torch.Tensor | None) -> tuple[None, None]:
        gradients, bucket = ctx.state.summing, ctx.state.bucket
        if gradients is None:
            raise LossError(
                f"backward() inside the loss reaches {bucket.label}. Use torch.autograd.grad(value, [x]) or "
                "value.backward(inputs=[x])"
            )
        if whole is not None or gradients.added(bucket):
            gradients.add(bucket, whole)
        return None, None


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, state: BucketState) -> tuple[torch.Tensor, ...]:
        ctx.state = state
        ctx.set_materialize_grads(False)
        return tuple(state.cut())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        if all(grad is None for grad in grads):
            return None, None
        if ctx.state.summing is not None:
            ctx.state.summing.note(ctx.state.bucket.paths, grads)
            if ctx.state.summing.add_leaves(ctx.state.bucket, grads):
                return None, None
        with naming(f"the gradient of {ctx.state.bucket.label}"):
            return ctx.state.bucket.pack(grads, ctx.state.bucket.reduce_dtype), None


class _StandIns(torch.autograd.Function):
    """Tensors without memory that stand for the leaves of a bucket, in every gather of a micro-batch."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, state: BucketState) -> tuple[torch.Tensor, ...]:
        ctx.state = state
        ctx.set_materialize_grads(False)
        return tuple(root.new_zeros((), dtype=state.bucket.dtype).expand(shape) for shape in state.bucket.shapes)

    backward = staticmethod(_Attach.backward)


class _Use(torch.autograd.Function):
    """One use of a gathered leaf: its gradient goes on alone, as those of a leaf that was not gathered do."""

    @staticmethod
    def forward(ctx: Any, stand_in: torch.Tensor, state: BucketState, position: int) -> torch.Tensor:
        return state.view(position).detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None


def attached(nexts: tuple[tuple[Any, int], ...]) -> bool:
    """Whether a node with these next nodes is a leaf's own node, or that of one use of it.

    They are right above `_Attach` and `_StandIns`: see ``separate`` and ``each_use`` of `BucketState`.
    """
    return len(nexts) == 1 and type(nexts[0][0]) in (_Attach._backward_cls, _StandIns._backward_cls)


class BucketState:
    """One bucket at run time.

    Args:
        routes: the bucket's exchanges. If later gathers of a micro-batch are shorter than the first, the second shard, which
            the first gather passes, is kept for them.
        separate: whether each leaf has a node of its own in the graph, so that autograd can compute some leaves' gradients
            without the others'.
        each_use: whether the gradient of each use of a gathered leaf is added on its own, in the leaf's dtype. Else those of
            one gather are added first.

    Attributes:
        each_use: as the argument, and parameters must be gathered for use.
        gathers: whether the parameters must be gathered for use.
        first: the number of the bucket's first leaf among its unit's.
        stored: this rank's buffer, as stored, or what reads it from disk.
        like: a tensor of the buffer's dtype on the device.
        whole: the whole, leaf-major buffer while it is gathered.
        anchor: the graph input of the root, with respect to which backward differentiates; None where no gradient is wanted.
        summing: set during the step's backward: gradients may be added to these sums directly. In a gradient that the loss
            function takes itself it is None, so that the gradient stays in the graph.
        written: whether the function is known to have written to the parameters in place.
    """

    written: bool
    like: torch.Tensor
    bucket: Bucket
    gathers: bool
    first: int

    def __init__(
        self,
        bucket: Bucket,
        mesh: Mesh,
        routes: Routes,
        separate: bool = False,
        each_use: bool = False,
    ) -> None:
        self.bucket, self.gathers, self.first = bucket, bucket.fetched, 0
        self.each_use: bool = each_use and self.gathers
        self._stand_ins: tuple[torch.Tensor, ...] = ()
        self._mesh, self._routes, self._separate = mesh, routes, separate
        self._keeps_second = len(routes.again) < len(routes.gather)
        self._second: torch.Tensor | None = None
        self._differentiated = False  # whether a backward follows, which gathers the parameters again
        self.stored: torch.Tensor | BufferOnDisk = torch.empty(0)
        self.like = torch.empty(0)
        self.whole: torch.Tensor | None = None
        with torch.inference_mode(False):
            self._anchor = torch.zeros(
                (), dtype=bucket.reduce_dtype, device=mesh.device, requires_grad=bucket.trainable
            )
        self.root: torch.Tensor | None = None
        self.summing: Gradients | None = None
        self._coming: Gather | None = None
        self.written = self._given = False
        self._version = 0
        self._views: list[torch.Tensor] | None = None
        self._starts: dict[int | torch.SymInt, int] = {}  # offset in the whole buffer's storage -> leaf

    def bind(self, stored: torch.Tensor | BufferOnDisk, gradients: Gradients | None) -> None:
        self.stored = stored
        self.like = torch.empty(0, dtype=stored.dtype, device=self._mesh.device)
        self.written, self._given = False, True
        self._hold(None if isinstance(stored, BufferOnDisk) or self.gathers else stored)
        self.root = self.summing = None
        self._stand_ins = ()
        self._differentiated = gradients is not None
        if gradients is not None and self.bucket.trainable:
            self.root = run_first(_Root.apply(self._anchor, self))

    def unbind(self) -> None:
        """Free the graph and the parameters of a finished micro-batch."""
        self.stored, self._given = torch.empty(0), False
        self.whole = self.root = self.summing = self._coming = self._second = self._views = None
        self._stand_ins = ()

    @property
    def anchor(self) -> torch.Tensor | None:
        return None if self.root is None else self._anchor

    def announce(self) -> None:
        if isinstance(self.stored, BufferOnDisk) and self._second is None:
            self.stored.announce()

    def fetch(self) -> None:
        if self.gathers:
            with naming(self.bucket.label):
                self._coming = self._gather()

    def arrive(self) -> None:
        if self._coming is not None:
            self._hold(self._land(self._coming))
            self._coming = None

    def serve(self) -> None:
        """Take part in a gather that other ranks need, without keeping its result."""
        if self.gathers:
            self._land(self._gather())

    def stand_in(self) -> None:
        """Use zeros as the gathered parameters."""
        if self.gathers:
            self._hold(self.like.new_zeros(self.bucket.size(0)))

    def _gather(self) -> Gather:
        if self._second is not None:
            return Gather(self._mesh, self._routes.again, self._second)
        if isinstance(self.stored, BufferOnDisk):
            return self.stored.gather(self._routes.gather)
        comes = self._mesh.abstract and self.bucket.memory.param != "device"
        return Gather(self._mesh, self._routes.gather, self.stored, comes=comes)

    def _land(self, coming: Gather) -> torch.Tensor:
        whole = coming.wait()
        if self._differentiated and self._keeps_second and self._second is None:
            self._second = coming.passed[len(self._routes.again)]
        return whole

    def release(self) -> None:
        if self._coming is not None:
            self._coming.wait()  # its memory must not be freed while the exchange writes to it
            self._coming = None
        if self.gathers:
            self.note_writes()
            self.whole = self._views = None

    def note_writes(self) -> None:
        """Set ``written`` if the gathered parameters have been written to since they were gathered."""
        if self.whole is not None and _version(self.whole) != self._version:
            self.written = True

    def _hold(self, whole: torch.Tensor | None) -> None:
        self.whole, self._views = whole, None
        if whole is not None:
            self._version = _version(whole)

    def cut(self) -> list[torch.Tensor]:
        """The whole leaves, as views outside the graph."""
        if self.whole is None:
            raise used_elsewhere(self.bucket.label)
        leaves = self.bucket.leaves(self.whole)
        if not self._starts:
            self._starts = {leaf.storage_offset(): position for position, leaf in enumerate(leaves)}
        return leaves

    def require_given(self) -> None:
        """Refuse a use of the parameters that is in no call which was given them; other ranks would not gather them."""
        if not self._given:
            raise used_elsewhere(self.bucket.label)

    def leaf_at(self, tensor: torch.Tensor) -> int | None:
        """The position of the leaf that equals a view of the whole buffer; None if the view is no leaf."""
        position = self._starts.get(tensor.storage_offset())
        same = position is not None and tensor.size() == self.bucket.shapes[position] and tensor.is_contiguous()
        return position if same else None

    def view(self, position: int) -> torch.Tensor:
        """A whole leaf, outside the graph. All leaves are cut at once, which is faster than one by one."""
        if self._views is None:
            self._views = self.cut()
        return self._views[position]

    def use(self, position: int) -> torch.Tensor:
        """A whole leaf for one use, connected to the root if gradients are wanted."""
        if self.root is None:
            return self.view(position)
        if not self._stand_ins:
            self._stand_ins = _StandIns.apply(self.root, self)
            run_first(self._stand_ins[0])
        return _Use.apply(self._stand_ins[position], self, position)

    def leaves(self) -> list[torch.Tensor]:
        """The whole leaves, connected to the root if gradients are wanted."""
        if self.root is None:
            return self.cut()
        leaves = list(_Attach.apply(self.root, self))
        run_first(leaves[0])
        return [run_first(leaf.view_as(leaf)) for leaf in leaves] if self._separate else leaves


def _version(tensor: torch.Tensor) -> int:
    """The number of writes to a tensor's memory; 0 for tensors of inference_mode, which do not count them."""
    return 0 if tensor.is_inference() else version_of(tensor)


class UnitState:
    """One unit at run time; the source of its leaves' handles.

    Attributes:
        notes: what stands for each leaf where autograd saves it while it is gathered.
    """

    name: str
    label: str
    home: str | None

    def __init__(
        self,
        name: str,
        buckets: list[BucketState],
        touch: Callable[[UnitState], None],
        placements: Mapping[str, Placement],
        slices: Slices,
    ) -> None:
        self.name, self.label, self.home = name, buckets[0].bucket.label, buckets[0].bucket.home
        self.buckets = buckets
        self._touch, self._placements, self._slices = touch, placements, slices
        self._positions = [(state, position) for state in buckets for position in range(len(state.bucket.paths))]
        for state, following in pairwise(buckets):
            following.first = state.first + len(state.bucket.paths)
        self.notes: list[tuple[UnitState, int]] = [(self, index) for index in range(len(self._positions))]
        self._leaves: list[torch.Tensor] | None = None
        self.gathers: bool = any(state.gathers for state in buckets)

    @property
    def paths(self) -> list[str]:
        return [path for state in self.buckets for path in state.bucket.paths]

    def announce(self) -> None:
        for state in self.buckets:
            state.announce()

    def fetch(self) -> None:
        for state in self.buckets:
            state.fetch()

    def arrive(self) -> None:
        for state in self.buckets:
            state.arrive()

    def release(self) -> None:
        self._leaves = None
        for state in self.buckets:
            state.release()

    def require_given(self) -> None:
        for state in self.buckets:
            state.require_given()

    def serve(self) -> None:
        for state in self.buckets:
            state.serve()

    def stand_in(self) -> None:
        for state in self.buckets:
            state.stand_in()

    def attached(self) -> list[torch.Tensor]:
        """All leaves, whole and connected to the graph, even if first touched under no_grad or in a transform."""
        if self._leaves is None:
            with torch.inference_mode(False), torch.enable_grad(), without_func():
                self._leaves = [leaf for state in self.buckets for leaf in state.leaves()]
        return self._leaves

    def leaf(self, index: int) -> torch.Tensor:
        if torch.compiler.is_dynamo_compiling():
            refuse_compiled(
                f"a compiled function uses {self.buckets[0].bucket.label}, gathered or sliced as it is used"
            )
        if self.gathers:
            self._touch(self)
        state, position = self._positions[index]
        if state.each_use:
            with torch.inference_mode(False), torch.enable_grad(), without_func():
                return state.use(position)
        leaves = self._leaves
        return leaves[index] if leaves is not None else self.attached()[index]

    def data(self, index: int) -> torch.Tensor:
        if self.gathers:
            self._touch(self)
        state, position = self._positions[index]
        return state.view(position)

    def saved(self, index: int) -> torch.Tensor:
        """The parameter, gathered, for a backward that saved it; autograd connects it to the graph itself."""
        if self._leaves is not None:  # not released since the forward: these need not be cut again
            return self._leaves[index]
        state, position = self._positions[index]
        return state.view(position)

    def root_gradient(self, index: int) -> tuple[torch.Tensor, Any]:
        state, position = self._positions[index]
        assert state.root is not None

        def read(whole: torch.Tensor) -> torch.Tensor:
            return state.bucket.unpack(whole)[position].to(state.bucket.dtype)

        return state.root, read

    def handles(self, trained: bool) -> dict[str, Handle]:
        """Path -> handle, for the leaves that need one: all if the unit is gathered, else those with a style or dealt out.

        Leaves in tiles have handles of their own: see `shardlib.execute.tiles`.
        """
        made: dict[str, Handle] = {}
        if self.home is not None:
            return made
        for index, (path, (state, position)) in enumerate(zip(self.paths, self._positions, strict=True)):
            placement = self._placements[path]
            described = state.bucket.shapes[position], state.like, trained and state.bucket.trainable
            if placement.style is not None:
                made[path] = SlicedHandle.make(self, index, placement, *described, self._slices)
            elif self.gathers or placement.dealt:
                made[path] = Handle(self, index, path, *described)
        return made

    def forget(self) -> None:
        """Free the graph and the parameters of a finished micro-batch."""
        self._leaves = None
        for state in self.buckets:
            state.unbind()

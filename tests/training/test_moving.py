"""States that were moved to the host or to disk train on as if they had stayed, to the bit."""

import gc
import weakref

import pytest
import torch
from helpers.faults import FULL, Faults
from helpers.models import mlp, regression_batch, share

import shardlib as sl
from shardlib.errors import DonatedStateError, RankFailure, StorageError, TreeError
from shardlib.sharded.disk import Store
from shardlib.tree import leaves_of, tensors_of, tree_map

LOSS, PARAMS = mlp([5, 7, 3])
BATCHES = [regression_batch(12, 5, 3, seed=seed) for seed in range(4)]
OPT = sl.optim
PLANS = {
    "plain": (lambda: [], lambda: OPT.sgd(0.1, momentum=0.9), {"data": 1}),
    "stage 3": (lambda: [sl.zero(3)], lambda: OPT.adamw(0.1), {"data": 3}),
    "masters": (lambda: [sl.zero(1), sl.precision("bf16")], lambda: OPT.adamw(0.1), {"data": 2}),
    "loss scale": (lambda: [sl.zero(2), sl.precision("fp16")], lambda: OPT.adamw(0.1), {"data": 2}),
    "residuals": (lambda: [sl.zero(1), sl.onebit()], lambda: OPT.lion(0.01), {"data": 2}),
    "slow weights": (lambda: [sl.zero(2)], lambda: OPT.lookahead(OPT.adam(0.1), 2, 0.5), {"data": 2}),
    "factored": (lambda: [sl.zero(1)], lambda: OPT.adafactor(0.05, min_dim_size_to_factor=4), {"data": 2}),
}


def there_and_back(state, kind, folder):
    if kind == "host":
        return sl.to_device(sl.to_host(state))
    if kind == "disk":
        return sl.to_device(sl.to_disk(state, folder))
    moved = sl.to_disk(sl.to_host(state), [folder / "a", folder / "b"])
    return sl.to_device(sl.to_host(moved))


def trained(mesh, plan, kind=None, folder=None):
    """The bits of the states after each of four steps."""
    transforms, optimizer, _ = PLANS[plan]
    state, step = sl.make_train_step(LOSS, sl.shard(PARAMS, mesh, sl.chain(*transforms())), optimizer())
    found = []
    for batch in BATCHES:
        if kind:
            state = there_and_back(state, kind, folder)
        state, metrics = step(state, share(batch, mesh.rank, mesh.size))
        tensors = tensors_of(state)
        found.append([state.step, state.scale, float(metrics["loss"]), *[bits(tensor) for tensor in tensors]])
    return found


def bits(tensor):
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("plan", PLANS)
def test_a_moved_state_trains_on(tmp_path, plan):
    mesh = PLANS[plan][2]
    wanted = sl.simulate(trained, plan, mesh=mesh)
    for kind in ("host", "disk", "both"):
        assert sl.simulate(trained, plan, kind, tmp_path / kind, mesh=mesh) == wanted


def test_a_run_that_has_ended_goes_on_from_its_folder(tmp_path):
    """In another process nothing is left of the state but its files; its key and loss scale are theirs too."""

    def run(mesh, after):
        params = sl.shard(PARAMS, mesh, sl.chain(sl.zero(2), sl.precision("fp16")))
        state, step = sl.make_train_step(LOSS, params, sl.optim.adamw(0.1), rng=after)
        if after:
            state = sl.to_device(tmp_path, like=state)
        losses = []
        for batch in BATCHES[after:] if after else BATCHES:
            if state.step == 2 and not after:
                state = sl.to_device(sl.to_disk(state, tmp_path))
            state, metrics = step(state, share(batch, mesh.rank, mesh.size))
            losses.append((state.step, float(metrics["loss"]), state.rng, state.scale))
        return losses

    whole = sl.simulate(run, 0, mesh={"data": 2})
    assert sl.simulate(run, 2, mesh={"data": 2}) == [losses[2:] for losses in whole]


def test_ranks_that_died_one_step_apart_take_up_the_step_that_all_have(tmp_path, monkeypatch):
    """By whatever state all have, and not by its number: a sharded tree has none."""
    commit = Store.commit

    def parked(mesh, kind):
        held = state_of(mesh, kind, 1.0)
        held = sl.to_device(sl.to_disk(held, tmp_path / kind))
        held = tree_map(lambda leaf: leaf + 1 if isinstance(leaf, torch.Tensor) else leaf, held)
        with pytest.raises(StorageError if mesh.rank else RankFailure, match="as if it had died"):
            sl.to_disk(held, tmp_path / kind)
        return None

    def state_of(mesh, kind, value):
        params = {"w": torch.full((40,), value)}
        if kind == "tree":
            return {"a": sl.shard(params, mesh, stage=3)}
        return sl.make_train_step(LOSS, sl.shard(params, mesh, stage=3), sl.optim.adamw(0.1))[0]

    def dying(self, step, notes=b""):
        if self._layout.rank == 1 and step == 2:
            raise StorageError("as if it had died")
        commit(self, step, notes)

    def resumed(mesh, kind):
        held = sl.to_device(tmp_path / kind, like=state_of(mesh, kind, 0.0))
        found = (held["a"] if kind == "tree" else held.params).buffers.values()
        sl.to_device(sl.to_disk(held, tmp_path / kind))  # and the folder goes on being used
        return [buffer.unique().tolist() for buffer in found]

    for kind in ("tree", "state"):
        with monkeypatch.context() as patch:
            patch.setattr(Store, "commit", dying)
            sl.simulate(parked, kind, mesh={"data": 2})
        assert sl.simulate(resumed, kind, mesh={"data": 2}) == [[[1.0]]] * 2


def start(**options):
    return sl.make_train_step(LOSS, sl.shard(PARAMS, sl.make_mesh(), **options), sl.optim.adamw(0.1))


def test_its_memory_is_given_back(tmp_path):
    """Nothing that the library holds keeps the memory of a state on disk; views of the user's stay what they were."""
    params = sl.shard(PARAMS, sl.make_mesh())
    state, step = sl.make_train_step(LOSS, params, sl.optim.adamw(0.1))
    state, _ = step(state, BATCHES[0])
    tensors = [*state.params.buffers.values(), *[leaf for leaf in leaves_of(state.opt) if leaf.dim()]]
    alive = [weakref.ref(tensor) for tensor in tensors]
    view = state.params["layers"][0]["weight"]
    kept, base = view.clone(), view._base
    del tensors
    moved = sl.to_disk(state, tmp_path)
    gc.collect()
    left = [each() for each in alive if each() is not None]
    assert len(left) == 1 and left[0] is base and torch.equal(view, kept)
    state, _ = step(sl.to_device(moved), BATCHES[1])


def test_trees_move_too(tmp_path):
    shared = torch.arange(12.0)
    tree = {"a": shared[2:6], "b": [shared.view(3, 4).T, 3, torch.empty(0), torch.tensor(2)]}
    for move in (sl.to_host, lambda tree: sl.to_disk(tree, tmp_path)):
        back = sl.to_device(move(tree))
        assert back["a"].tolist() == [2, 3, 4, 5] and torch.equal(back["b"][0], shared.view(3, 4).T)
        assert back["b"][1] == 3 and back["b"][3].item() == 2 and back["b"][2].numel() == 0
        back["a"].zero_()
        assert back["b"][0][2, 0] == 0  # they share memory as before
        shared = torch.arange(12.0)
        tree = {"a": shared[2:6], "b": [shared.view(3, 4).T, 3, torch.empty(0), torch.tensor(2)]}
    params = sl.to_host(sl.shard(PARAMS, sl.make_mesh()))
    assert torch.equal(sl.to_device(params)["layers"][0]["weight"], PARAMS["layers"][0]["weight"])


def test_a_state_that_is_elsewhere_says_so(tmp_path):
    state, step = start()
    moved = sl.to_host(state)
    with pytest.raises(
        DonatedStateError, match=r"step 0\) was donated: sl.to_host has taken .* Go on with what sl.to_host"
    ):
        step(state, BATCHES[0])
    with pytest.raises(TreeError, match=r"the state of step 0 lies in host memory: bring it back with sl.to_device"):
        step(moved, BATCHES[0])
    later = sl.to_disk(moved, tmp_path / "states")
    assert repr(later) == f"Moved(the state of step 0, in {tmp_path}/states)"
    with pytest.raises(DonatedStateError, match="was moved on from host memory; use what that call returned"):
        sl.to_device(moved)
    with pytest.raises(TreeError, match="is on disk already"):
        sl.to_disk(later, tmp_path / "others")
    sl.to_device(later)
    with pytest.raises(TypeError, match="needs like="):
        sl.to_device(tmp_path / "states")


def test_a_folder_of_another_state_is_refused(tmp_path):
    sl.to_disk(start()[0], tmp_path / "adamw")
    other, _ = sl.make_train_step(LOSS, sl.shard(PARAMS, sl.make_mesh()), sl.optim.sgd(0.1))
    with pytest.raises(StorageError, match=r"differ:\n  - opt/.* × uint8, here absent"):
        sl.to_device(tmp_path / "adamw", like=other)
    with pytest.raises(StorageError, match=r"holds no state that is whole on every rank.*or restore a checkpoint"):
        sl.to_device(tmp_path / "empty", like=other)


def test_a_full_disk_leaves_the_state_where_it_was(tmp_path, monkeypatch):
    def run(mesh):
        state, step = sl.make_train_step(LOSS, sl.shard(PARAMS, mesh, stage=3), sl.optim.adamw(0.1))
        with pytest.raises(StorageError if mesh.rank else RankFailure) as refused:
            sl.to_disk(state, tmp_path)
        state, _ = step(state, share(BATCHES[0], mesh.rank, mesh.size))
        return state.step, str(refused.value)

    with monkeypatch.context() as patch:
        Faults(patch).fails("posix_fallocate", FULL, "rank-1-")
        (first, message), (second, own) = sl.simulate(run, mesh={"data": 2})
    assert first == second == 1 and "Free space there" in own
    assert f"the state was not moved to {tmp_path}, and is where it was:\n  - rank 1: StorageError: making" in message

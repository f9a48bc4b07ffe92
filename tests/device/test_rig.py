"""The test device is what tests need: a memory of its own, and streams behind which numbers are wrong until one waits."""

import signal
import subprocess
import sys
import time

import pytest

MB = 1_000_000


def test_memory_is_counted_and_has_a_budget(on_rig):
    def run(mesh):
        import torch
        from helpers import rig

        rig.reset()
        before = rig.counts().live
        x = torch.ones(1000, device="rig")
        y = x * 2
        held = rig.counts().live - before
        del y
        seen = held, rig.counts().live - before, rig.counts().peak - before
        with (
            rig.limits(budget=rig.counts().live + 100),
            pytest.raises(torch.OutOfMemoryError, match="120 bytes more than"),
        ):
            torch.empty(30, device="rig")
        x.untyped_storage().resize_(0)
        return seen, rig.counts().live - before

    assert on_rig(run) == ((8000, 4000, 8000), 0)


@pytest.mark.parametrize("pinned", [True, False])
def test_host_memory_is_counted_and_has_a_budget(on_rig, pinned):
    def run(mesh):
        import torch
        from helpers import rig

        rig.reset()
        before = rig.counts()
        x = torch.empty(1024, pin_memory=pinned)
        seen = [rig.counts().host - before.host, rig.counts().pinned - before.pinned]
        del x
        seen += [rig.counts().host - before.host, rig.counts().host_peak - before.host]
        with (
            rig.limits(host=rig.counts().host + 100),
            pytest.raises(torch.OutOfMemoryError, match="128 bytes more than"),
        ):
            torch.empty(32, pin_memory=pinned)
        return seen

    assert on_rig(run) == [4096, 4096 * pinned, 0, 4096]


def test_pages_that_are_pinned_count_as_host_memory(on_rig):
    def run(mesh):
        from helpers import rig

        from shardlib.common.devices import pages

        before = rig.counts().host
        x = pages(5000, pinned=True)
        seen = [rig.counts().host - before]
        with rig.limits(host=rig.counts().host + 100), pytest.raises(MemoryError, match="128 bytes"):
            pages(128, pinned=True)
        del x
        return [*seen, rig.counts().host - before]

    assert on_rig(run) == [5000, 0]


def test_what_was_not_written_or_was_freed_is_nan(on_rig):
    def run(mesh):
        import torch

        fresh = torch.empty(8, device="rig").isnan().all().item()
        x = torch.ones(8, device="rig")
        view = x.data_ptr()
        del x
        again = torch.empty(8, device="rig")
        return (
            fresh,
            again.data_ptr() == view,
            again.isnan().all().item(),
            torch.empty(2, dtype=torch.int64, device="rig").tolist(),
        )

    assert on_rig(run) == (True, True, True, [-1, -1])


def test_the_host_cannot_read_it():
    program = (
        "import ctypes, torch; from helpers import rig; rig.start(); x = torch.ones(4, device='rig'); "
        "print(x.sum().item(), flush=True); ctypes.string_at(x.data_ptr(), 16)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=_environment())
    assert done.stdout == "4.0\n" and done.returncode == -signal.SIGSEGV


def _environment():
    import os
    from pathlib import Path

    tests = Path(__file__).parents[1]
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), *filter(None, sys.path)])}


def test_copies_are_counted_and_take_their_time(on_rig):
    def run(mesh):
        import torch
        from helpers import rig

        host, took = torch.ones(25_000), []
        for _ in range(3):
            rig.reset()
            with rig.limits(up=1 * MB, down=0.5 * MB):
                begun = time.perf_counter()
                x = host.to("rig")
                middle = time.perf_counter()
                x.cpu()
                took.append((middle - begun, time.perf_counter() - middle))
            x.sum().item()
            counts = rig.counts()
        return (counts.up, counts.ups, counts.down, counts.downs), *map(min, zip(*took, strict=True))

    counted, up, down = on_rig(run)
    assert counted == (100_000, 1, 100_004, 2)
    assert 0.1 <= up < 0.2 and 0.2 <= down < 0.4  # the shortest of three: others may keep the processor busy


@pytest.mark.parametrize("pinned", [True, False])
def test_copies_run_behind_from_pinned_memory_alone(on_rig, pinned):
    def run(mesh):
        import torch
        from helpers import rig

        host = torch.ones(25_000)
        host = host.pin_memory() if pinned else host
        x, side = torch.zeros(25_000, device="rig"), torch.Stream(device="rig")
        with rig.limits(up=0.1 * MB):  # 1 s
            begun = time.perf_counter()
            with side:
                x.copy_(host, non_blocking=True)
                done = side.record_event()
            returned = time.perf_counter() - begun
            early = x.sum().item()
            torch.accelerator.current_stream().wait_event(done)
            return returned < 0.9, early, x.sum().item()

    assert on_rig(run) == ((True, 0.0, 25_000.0) if pinned else (False, 25_000.0, 25_000.0))


def test_a_copy_down_is_not_there_before_its_event(on_rig):
    def run(mesh):
        import torch
        from helpers import rig

        host, x = torch.zeros(25_000, pin_memory=True), torch.ones(25_000, device="rig")
        with rig.limits(down=0.5 * MB):
            host.copy_(x, non_blocking=True)
            event = torch.accelerator.current_stream().record_event()
            early = host.sum().item(), event.query()
            event.synchronize()
            return early, host.sum().item()

    assert on_rig(run) == ((0.0, False), 25_000.0)


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_that_another_stream_reads_must_be_recorded(on_rig, recorded):
    def run(mesh):
        import torch
        from helpers import rig

        host, x, side = (
            torch.zeros(25_000, pin_memory=True),
            torch.ones(25_000, device="rig"),
            torch.Stream(device="rig"),
        )
        with rig.limits(down=0.5 * MB):
            blocker = torch.empty(25_000, pin_memory=True)
            side.wait_stream(torch.accelerator.current_stream())
            with side:
                blocker.copy_(torch.zeros(25_000, device="rig"), non_blocking=True)
                host.copy_(x, non_blocking=True)
            if recorded:
                x.record_stream(side)
            del x
            side.synchronize()
        return host.isnan().any().item()

    assert on_rig(run) is not recorded


def test_pinned_memory_that_a_copy_reads_may_be_freed(on_rig):
    def run(mesh):
        import torch
        from helpers import rig

        x = torch.empty(25_000, device="rig")
        with rig.limits(up=0.5 * MB):
            x.copy_(torch.full((25_000,), 3.0).pin_memory(), non_blocking=True)
            for _ in range(3):
                torch.zeros(25_000).pin_memory()
        return x.unique().tolist()

    assert on_rig(run) == [3.0]


def test_events_measure_time(on_rig):
    def run(mesh):
        import torch
        from helpers import rig

        def measured():
            events = [torch.Event("rig", enable_timing=True) for _ in range(2)]
            events[0].record()
            with rig.limits(down=1 * MB):
                x.cpu()
            events[1].record()
            events[1].synchronize()
            return events[0].elapsed_time(events[1])

        x = torch.ones(25_000, device="rig")
        return min(measured() for _ in range(3))

    assert 100 <= on_rig(run) < 200  # the shortest of three: others may keep the processor busy


def test_its_generator(on_rig):
    def run(mesh):
        import torch

        def draw(seed):
            torch.manual_seed(seed)
            return torch.rand(4, device="rig").tolist()

        own = torch.Generator(device="rig").manual_seed(3)
        state = own.get_state()
        first = torch.randn(4, device="rig", generator=own)
        own.set_state(state)
        before = torch.get_rng_state()
        torch.rand(4, device="rig")
        untouched = torch.equal(before, torch.get_rng_state())
        return draw(1) == draw(1) != draw(2), torch.equal(first, torch.randn(4, device="rig", generator=own)), untouched

    assert on_rig(run) == (True, True, True)


def test_views_share_memory(on_rig):
    def run(mesh):
        import torch

        x = torch.zeros(4, 6, device="rig")
        views = [
            x.T,
            x[1:],
            x.view(6, 4),
            x.unfold(0, 2, 1),
            x.flatten(),
            x.view(torch.int32),
            x.expand(2, 4, 6),
            x.diagonal(),
        ]
        return [view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for view in views]

    assert all(on_rig(run))


def test_a_copy_of_a_module(on_rig):
    def run(mesh):
        import copy

        import torch

        layer = torch.nn.Linear(3, 2, device="rig")
        other = copy.deepcopy(layer)
        with torch.no_grad():
            other.weight.zero_()
        return str(other.weight.device), layer.weight.abs().sum().item() > 0

    assert on_rig(run) == ("rig:0", True)


def test_gradients_recomputation_and_saved_tensors_on_the_host(on_rig):
    def run(mesh):
        import torch
        from torch.utils.checkpoint import checkpoint

        def gradient(x, form):
            x = x.clone().requires_grad_()
            form(x).backward()
            return x.grad.cpu()

        def on_host(x):
            with torch.autograd.graph.save_on_cpu(pin_memory=True, device_type="rig"):
                return (x.exp() * x).sum()

        x = torch.randn(8, 8)
        forms = [on_host, lambda v: checkpoint(lambda u: (u.exp() * u).sum(), v, use_reentrant=False)]
        plain = gradient(x, lambda v: (v.exp() * v).sum())
        return [torch.allclose(gradient(x.to("rig"), form), plain, rtol=1e-6) for form in forms]

    assert all(on_rig(run))


def test_collectives_between_two(rigs):
    def run(mesh):
        import torch

        from shardlib.collectives import all_gather, all_reduce

        x = torch.full((2,), float(mesh.rank + 1), device=mesh.device)
        total, both = all_reduce(x, "data", dst="invariant", mesh=mesh), all_gather(x, "data", mesh=mesh)
        return str(total.device), total.tolist(), both.tolist()

    assert rigs.run(run, mesh={"data": 2}) == [("rig:0", [3.0, 3.0], [1.0, 1.0, 2.0, 2.0])] * 2


def test_what_happens_is_recorded(on_rig):
    def run(mesh):
        import torch
        from helpers import rig

        host = torch.ones(1000).pin_memory()
        begun = time.monotonic()
        with rig.limits(up=1e6), rig.recorded() as entries:
            before = rig.counts().live
            x = host.to("rig", non_blocking=True)
            back = x.cpu()
            del x
        torch.ones(10, device="rig")  # after it
        times = [time for entry in entries for time in (entry.begin, entry.end)]
        in_order = begun <= min(times) and max(times) <= time.monotonic()
        (up,) = (entry for entry in entries if entry.kind == "up")
        memory = [entry.bytes - before for entry in entries if entry.kind == "memory"]
        return in_order, up.bytes, up.end - up.begin >= 4e-3, memory, back.sum().item()

    assert on_rig(run) == (True, 4000, True, [4000, 0], 1000.0)

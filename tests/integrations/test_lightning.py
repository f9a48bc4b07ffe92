"""`shardlib.integrations.lightning` against Lightning's own DDPStrategy: what both log, and what they leave behind."""

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

import shardlib as sl
from shardlib.errors import CheckpointError, IllegalComposition, TreeError
from shardlib.integrations.lightning import ShardedStrategy


class Classifier(pl.LightningModule):
    """Two groups of the optimizer, and what modules have besides: dropout that is off, statistics, a tied layer."""

    def __init__(self, kind="adamw", seed=0):
        super().__init__()
        if seed is not None:
            torch.manual_seed(seed)
        self.kind = kind
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.again = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.again.weight
        self.outside = [torch.zeros(1)]

    def forward(self, x):
        return self.last(self.tied(self.again(self.norm(self.first(x).relu()))).relu())

    def training_step(self, batch, index):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss} if index % 2 else loss

    def validation_step(self, batch, index):
        out = self(batch[0])
        self.log("loss", F.cross_entropy(out, batch[1]), sync_dist=True)
        self.log("hits", (out.argmax(-1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        named = dict(self.named_parameters())
        groups = [
            {"params": [leaf for leaf in named.values() if leaf.dim() > 1], "weight_decay": 0.1},
            {"params": [leaf for leaf in named.values() if leaf.dim() < 2], "weight_decay": 0.0, "lr": 0.02},
        ]
        makers = {"adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop}
        optimizer = makers.get(self.kind, torch.optim.AdamW)(groups, lr=0.01)
        if self.kind == "cyclic":
            return [optimizer], [
                {"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 20), "interval": "step"}
            ]
        if self.kind == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=1.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss"}}
        falling = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": falling, "interval": "step"}]


class Seen(Callback):
    def __init__(self):
        self.numbers = []

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        self.numbers.append([float(trainer.callback_metrics.get("train_loss_step", 0)), *rates, trainer.global_step])

    def on_validation_end(self, trainer, module):
        self.numbers.append([float(trainer.callback_metrics[name]) for name in ("loss", "hits")])


def data(count, batch):
    random = torch.Generator().manual_seed(1)
    x, y = torch.randn(count, 6, generator=random), torch.randint(3, (count,), generator=random)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=batch)


def fit(folder, strategy, module, path=None, devices=1, epochs=2, rows=21, **options):
    seen = Seen()
    saved = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, max_epochs=epochs, callbacks=[seen, saved], logger=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=1, **options,
    )  # fmt: skip
    trainer.fit(module, data(rows, 2), data(8, 4), ckpt_path=path)
    return seen.numbers, trainer


def assert_same_numbers(ours, theirs):
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-6)


CASES = {
    "adamw": ("adamw", {}),
    "clipped": ("adamw", {"gradient_clip_val": 0.5}),
    "rmsprop": ("rmsprop", {}),
    "plateau": ("plateau", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_it_trains_and_logs_as_lightning_does(tmp_path, case):
    kind, options = CASES[case]
    theirs, their_trainer = fit(tmp_path / "theirs", DDPStrategy(), Classifier(kind), **options)
    ours, trainer = fit(tmp_path / "ours", ShardedStrategy(sl.zero(3)), Classifier(kind), **options)
    assert_same_numbers(ours, theirs)
    wanted = their_trainer.lightning_module.state_dict()
    for name, leaf in trainer.lightning_module.state_dict().items():
        torch.testing.assert_close(leaf, wanted[name], rtol=1e-3, atol=1e-5)
    results = [each.validate(each.lightning_module, data(8, 4), verbose=False)[0] for each in (trainer, their_trainer)]
    assert results[0] == pytest.approx(results[1], rel=1e-4)


def test_micro_batches_are_the_batches_of_a_step(tmp_path):
    found = []
    for name, strategy in (("theirs", DDPStrategy()), ("ours", ShardedStrategy(sl.zero(2)))):
        _, trainer = fit(tmp_path / name, strategy, Classifier(), rows=24, accumulate_grad_batches=4)
        assert trainer.global_step == 6
        found.append(trainer.lightning_module.state_dict())
    for name, leaf in found[0].items():
        torch.testing.assert_close(found[1][name], leaf, rtol=1e-3, atol=1e-5)
    # Of 11 batches the last step of an epoch has three.
    _, trainer = fit(tmp_path / "less", ShardedStrategy(sl.zero(2)), Classifier(), accumulate_grad_batches=4)
    assert trainer.global_step == 6


def test_it_goes_on_from_a_checkpoint_at_another_stage(tmp_path):
    whole, trainer = fit(tmp_path / "a", ShardedStrategy(sl.zero(3)), Classifier())
    path = tmp_path / "a" / "epoch=0.ckpt"
    rest, _ = fit(tmp_path / "b", ShardedStrategy(sl.zero(1)), Classifier(), path)
    assert_same_numbers(rest[-12:], whole[-12:])
    loaded = Classifier.load_from_checkpoint(tmp_path / "a" / "epoch=1.ckpt")
    for name, leaf in trainer.lightning_module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], leaf)
    _, plain = fit(tmp_path / "c", DDPStrategy(), Classifier(), epochs=1)
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(CheckpointError, match="load_from_checkpoint"):
        fit(tmp_path / "d", ShardedStrategy(), Classifier(), tmp_path / "plain.ckpt")


def unseeded(mesh, folder):
    torch.manual_seed(mesh.rank)
    _, trainer = fit(folder, ShardedStrategy(sl.zero(3)), Classifier(seed=None), devices=2, epochs=1)
    return [leaf.tolist() for leaf in trainer.lightning_module.parameters()]


def ranks(mesh, folder):
    theirs, _ = fit(f"{folder}/a", DDPStrategy(), Classifier(), devices=2)
    ours, _ = fit(f"{folder}/b", ShardedStrategy(sl.zero(3)), Classifier(), devices=2)
    return theirs, ours


def test_two_ranks_train_and_log_as_with_data_parallelism(tmp_path):
    for theirs, ours in sl.launch(ranks, str(tmp_path), mesh={"data": 2}):
        assert_same_numbers(ours, theirs)


def test_two_ranks_without_a_seed_begin_with_the_first_ones_values(tmp_path):
    first, second = sl.launch(unseeded, str(tmp_path), mesh={"data": 2})
    assert first == second


class Counting(Classifier):
    """What modules have besides parameters: metrics, lists, numbers, statistics. It trains in a step and reads in a hook."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.right, self.found = torchmetrics.Accuracy("multiclass", num_classes=3), nn.ModuleDict()
        self.found["f1"] = torchmetrics.MetricCollection([torchmetrics.F1Score("multiclass", num_classes=3)])
        self.losses, self.outs, self.steps = [], [], 0

    def training_step(self, batch, index):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.detach())
        self.steps += 1
        self.log("mean", loss, on_epoch=True, on_step=False)
        self.log("steps", 1.0, on_epoch=True, on_step=False, reduce_fx="sum")
        return {"loss": loss, "number": self.steps}

    def on_train_batch_end(self, outputs, batch, index):
        self.newest = float(outputs.get("number", 0))

    def on_train_epoch_end(self):
        self.log_dict({"listed": torch.stack(self.losses).mean(), "counted": float(self.steps), "last": self.newest})
        self.losses.clear()

    def validation_step(self, batch, index):
        out = self(batch[0])
        self.outs.append(out.argmax(-1))
        self.right.update(out, batch[1])
        self.found["f1"].update(out, batch[1])
        self.log("right", self.right)

    def on_validation_epoch_end(self):
        self.log_dict(
            {"loss": torch.cat(self.outs).float().mean(), "hits": self.found["f1"].compute()["MulticlassF1Score"]}
        )
        self.outs.clear()
        self.found["f1"].reset()


@pytest.mark.parametrize(("count", "rows", "epochs"), [(1, 23, 2), (4, 23, 2), (4, 20, 1)])
def test_a_module_measures_and_counts_as_ever(tmp_path, count, rows, epochs):
    """In micro-batches too, of which the last has fewer rows, and an epoch's last step may have three. Lightning divides
    that one by four, so that of these what was computed before is compared."""
    found = []
    for name, strategy in (("theirs", DDPStrategy()), ("ours", ShardedStrategy(sl.zero(2)))):
        module = Counting()
        trainer = pl.Trainer(
            strategy=strategy, accelerator="cpu", devices=1, max_epochs=epochs, logger=False,
            accumulate_grad_batches=count, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, default_root_dir=tmp_path / name,
        )  # fmt: skip
        trainer.fit(module, data(rows, 3), data(8, 4))
        numbers = {name: float(value) for name, value in trainer.callback_metrics.items()}
        found.append((numbers, dict(module.named_parameters()), dict(module.named_buffers())))
    (theirs, their_params, their_buffers), (ours, params, buffers) = found
    if rows == 20:
        before = {"mean", "steps", "listed", "counted", "last"}
        theirs, ours = ({name: numbers[name] for name in before} for numbers in (theirs, ours))
        params = their_params = {}
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(buffers, their_buffers, rtol=1e-3, atol=1e-5)
    for name, leaf in their_params.items():
        torch.testing.assert_close(params[name], leaf, rtol=1e-3, atol=1e-5, msg=name)


def test_it_goes_on_from_what_is_saved_after_fit_and_from_a_link(tmp_path):
    whole, trainer = fit(tmp_path / "a", ShardedStrategy(sl.zero(3)), Classifier(), epochs=3)
    _, trainer = fit(tmp_path / "b", ShardedStrategy(sl.zero(3)), Classifier(), epochs=2)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    (tmp_path / "last.ckpt").symlink_to("saved.ckpt")
    rest, _ = fit(tmp_path / "c", ShardedStrategy(sl.zero(3)), Classifier(), tmp_path / "last.ckpt", epochs=3)
    assert_same_numbers(rest[-12:], whole[-12:])


class OwnClipping(Classifier):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, 0.1, "norm")


def test_weights_cannot_be_averaged_while_they_are_in_shards(tmp_path):
    trainer = pl.Trainer(
        strategy=ShardedStrategy(), accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False,
        callbacks=[EMAWeightAveraging()], enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(TreeError, match="in shards while the model trains"):
        trainer.fit(Classifier(), data(8, 2))


class Several(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Several, {}, "configure_optimizers returned 2"),
        (Classifier, {"precision": "bf16-mixed"}, "sl.precision"),
        (Classifier, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "take 'norm'"),
        (lambda: Classifier("cyclic"), {}, "cycle_momentum"),
        (OwnClipping, {}, "OwnClipping.configure_gradient_clipping"),
    ],
)
def test_what_it_cannot_do_is_refused(tmp_path, module, options, message):
    with pytest.raises(IllegalComposition, match=message):
        fit(tmp_path, ShardedStrategy(sl.zero(3)), module(), **options)

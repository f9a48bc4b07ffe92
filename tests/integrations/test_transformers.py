"""The Trainer of `shardlib.integrations.transformers` against transformers' own: what they log, and leave behind."""

import os

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import EarlyStoppingCallback, LlamaConfig, LlamaForCausalLM, TrainingArguments

import shardlib as sl
from shardlib.errors import CheckpointError, IllegalComposition, MigrationError, TreeError
from shardlib.integrations.transformers import Trainer

LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_hits", "step")


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, max_position_embeddings=32, **sizes))


def with_adapters():
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, leaf in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(leaf, std=0.02)
    return model


def classifier():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=32, num_labels=3, **sizes, **off)
    return transformers.BertForSequenceClassification(config)


def tied():
    torch.manual_seed(0)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, **off))


def rows(count):
    """Sentences of 4 to 11 tokens, whose first has no target."""
    random = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 12, (count,), generator=random).tolist()
    tokens = [torch.randint(1, 32, (length,), generator=random).tolist() for length in lengths]
    return [{"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [-100, *ids[1:]]} for ids in tokens]


def padded(features):
    longest = max(len(each["input_ids"]) for each in features)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: torch.tensor([each[name] + [value] * (longest - len(each[name])) for each in features])
        for name, value in fill.items()
    }


def arguments(folder, **changed):
    usual = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "num_train_epochs": 2, "learning_rate": 1e-2,
        "warmup_steps": 3, "weight_decay": 0.1, "max_grad_norm": 0.5, "logging_steps": 1, "eval_strategy": "steps",
        "eval_steps": 4, "save_strategy": "steps", "save_steps": 4, "report_to": "none", "disable_tqdm": True,
        "use_cpu": True,
    }  # fmt: skip
    return TrainingArguments(str(folder), **usual | changed)


def trainer(kind, folder, model, extra=None, **changed):
    """A trainer of 21 sentences, so that an epoch ends with a step of two micro-batches, one of them of one row."""
    data = rows(27)
    options = {"train_dataset": data[:21], "eval_dataset": data[21:], "data_collator": padded, **(extra or {})}
    if issubclass(kind, Trainer):
        options.setdefault("transforms", sl.zero(3))
    return kind(model(), arguments(folder, **changed), **options)


def logs(trained):
    return [{name: entry[name] for name in LOGGED if name in entry} for entry in trained.state.log_history]


def assert_same_logs(ours, theirs):
    assert [entry.keys() for entry in ours] == [entry.keys() for entry in theirs]
    for mine, other in zip(ours, theirs):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-6)


def own_loss(base):
    class OwnLoss(base):
        loss_is_scaled_for_ga = False

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            out = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
            loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
            loss = (
                loss + 0.1 * out.logits.square().mean()
            )  # of padding too, which each micro-batch has as much as it needs
            return (loss, out) if return_outputs else loss

    return OwnLoss


CASES = {
    "usual": (llama, lambda base: base, {}),
    "own loss": (llama, own_loss, {}),
    "adapters": (with_adapters, lambda base: base, {}),
    "tied": (tied, lambda base: base, {}),
    "smoothed, cosine": (llama, lambda base: base, {"label_smoothing_factor": 0.1, "lr_scheduler_type": "cosine"}),
    "recomputed": (llama, lambda base: base, {"activation_checkpointing": True, "max_steps": 8}),
    "sgd, no clip": (llama, lambda base: base, {"optim": "sgd", "optim_args": "momentum=0.9", "max_grad_norm": 0.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_it_trains_and_logs_as_transformers_does(tmp_path, case):
    model, made, changed = CASES[case]
    theirs = trainer(made(transformers.Trainer), tmp_path / "theirs", model, **changed)
    ours = trainer(made(Trainer), tmp_path / "ours", model, **changed)
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-5)  # before it trains
    theirs.train()
    assert ours.train().global_step == theirs.state.global_step == 8
    assert_same_logs(logs(ours), logs(theirs))
    for (name, mine), (_, other) in zip(ours.model.named_parameters(), theirs.model.named_parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5, msg=name)
    assert os.path.isdir(tmp_path / "ours/checkpoint-4/shardlib")


def test_it_resumes_at_another_stage_and_its_files_are_those_of_the_model(tmp_path):
    first = trainer(Trainer, tmp_path / "first", llama)
    first.train()
    again = trainer(Trainer, tmp_path / "again", llama, {"transforms": sl.zero(1)})
    again.train(resume_from_checkpoint=str(tmp_path / "first/checkpoint-4"))
    assert_same_logs(logs(again)[-6:], logs(first)[-6:])
    found = LlamaForCausalLM.from_pretrained(tmp_path / "first/checkpoint-8")
    for mine, other in zip(found.parameters(), first.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no shardlib/"):
        again.train(resume_from_checkpoint=str(tmp_path / "empty"))


def test_adapters_are_written_as_peft_reads_them(tmp_path):
    ours = trainer(Trainer, tmp_path, with_adapters, save_strategy="no")
    ours.train()
    ours.save_model(tmp_path / "adapter")
    found = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter").state_dict()
    for name, leaf in ours.model.state_dict().items():
        assert torch.equal(found[name], leaf), name


def test_metrics_callbacks_and_the_best_model(tmp_path):
    """Of a classifier, whose loss is a mean over rows."""
    data = [{"input_ids": row["input_ids"][:4], "label": sum(row["input_ids"][:4]) % 3} for row in rows(27)]
    found = []
    for kind, name in ((transformers.Trainer, "theirs"), (Trainer, "ours")):
        extra = {
            "train_dataset": data[:21], "eval_dataset": data[21:], "data_collator": None,
            "compute_metrics": lambda seen: {"hits": float((seen.predictions.argmax(-1) == seen.label_ids).mean())},
            "callbacks": [EarlyStoppingCallback(1)],
        }  # fmt: skip
        options = {"load_best_model_at_end": True, "metric_for_best_model": "hits", "gradient_accumulation_steps": 1}
        each = trainer(kind, tmp_path / name, classifier, extra, **options)
        each.train()
        best = os.path.basename(each.state.best_model_checkpoint)
        found.append(
            (logs(each), best, torch.tensor(each.predict(data[21:]).predictions), each.evaluate()["eval_loss"])
        )
    assert_same_logs(found[1][0], found[0][0])
    assert found[1][1] == found[0][1]
    torch.testing.assert_close(found[1][2], found[0][2], rtol=1e-4, atol=1e-5)
    assert found[1][3] == pytest.approx(found[0][3], rel=1e-5)


def test_between_runs_the_model_has_the_values_whatever_is_done_to_it(tmp_path):
    """It is evaluated, trained on and written as it is, before the first training and after it."""
    both = [
        trainer(kind, tmp_path / name, llama, max_steps=2, save_strategy="no", gradient_accumulation_steps=1)
        for name, kind in (("theirs", transformers.Trainer), ("ours", Trainer))
    ]
    for _ in range(2):
        found = []
        for each in both:
            each.evaluate()
            for leaf in each.model.parameters():
                leaf.data.mul_(0.5)
            found.append(each.evaluate()["eval_loss"])
            each.save_model(tmp_path / "written")
            for mine, other in zip(
                LlamaForCausalLM.from_pretrained(tmp_path / "written").parameters(),
                each.model.parameters(),
                strict=True,
            ):
                assert torch.equal(mine, other)
            each.train()
        assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_each_run_begins_with_the_model_that_model_init_makes(tmp_path):
    data = rows(8)
    options = {"train_dataset": data, "data_collator": padded, "transforms": sl.zero(3)}
    ours = Trainer(args=arguments(tmp_path, max_steps=2, eval_strategy="no"), model_init=llama, **options)
    found = []
    for _ in range(2):
        ours.train()
        found.append(logs(ours)[:2])
    assert found[0] == found[1]


class StopsWithin(transformers.TrainerCallback):
    """Ends the first run after the first micro-batch of its second step."""

    def on_substep_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == 1 and not getattr(self, "stopped", False)
        self.stopped = getattr(self, "stopped", False) or control.should_training_stop


def test_micro_batches_of_a_step_that_was_not_taken_are_in_no_other(tmp_path):
    ours = trainer(Trainer, tmp_path, llama, {"callbacks": [StopsWithin()]}, save_strategy="no", eval_strategy="no")
    assert ours.train().global_step == 1 and ours.train().global_step == 8


def test_callbacks_cannot_compute_with_weights_that_are_in_shards(tmp_path):
    class Halves(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_):
            for leaf in model.parameters():
                leaf.data.mul_(0.5)

    with pytest.raises(TreeError, match="in shards while the model trains"):
        trainer(Trainer, tmp_path, llama, {"callbacks": [Halves()]}).train()


def resnet():
    torch.manual_seed(0)
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=3, **sizes))


@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 3}, {"save_only_model": True}])
def test_a_model_with_statistics_whose_norms_decay(tmp_path, options):
    """transformers decays BatchNorm's weights, which have one dimension and no known name. Statistics are those of the
    micro-batches that there are, where an epoch ends with fewer; and the best model's, of a checkpoint without a state."""
    random = torch.Generator().manual_seed(3)
    data = [{"pixel_values": torch.randn(3, 16, 16, generator=random), "labels": number % 3} for number in range(20)]
    found = []
    for kind, name in ((transformers.Trainer, "theirs"), (Trainer, "ours")):
        extra = {"train_dataset": data[:16], "eval_dataset": data[16:], "data_collator": None}
        best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
        each = trainer(kind, tmp_path / name, resnet, extra, **{"gradient_accumulation_steps": 1, **best, **options})
        each.model_accepts_loss_kwargs = False  # else transformers adds up the losses of micro-batches, which are means
        each.train()
        found.append((logs(each), each.model.state_dict()))
    assert_same_logs(found[1][0], found[0][0])
    for name, leaf in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], leaf, rtol=1e-3, atol=1e-5)


def on_two_ranks(mesh, folder):
    both = [trainer(kind, f"{folder}/{kind.__module__}", llama) for kind in (transformers.Trainer, Trainer)]
    for each in both:
        each.train()
    return [logs(each) for each in both]


def test_two_ranks_train_and_log_as_with_data_parallelism(tmp_path):
    for theirs, ours in sl.launch(on_two_ranks, str(tmp_path), mesh={"data": 2}):
        assert_same_logs(ours, theirs)


@pytest.mark.parametrize(
    ("changed", "extra", "error", "message"),
    [
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, {}, MigrationError, "lr_scheduler_type"),
        ({"optim": "galore_adamw"}, {}, MigrationError, "write one of"),
        (
            {},
            {"optimizers": (torch.optim.SGD(torch.nn.Linear(1, 1).parameters()), None)},
            IllegalComposition,
            "optimizer=",
        ),
        ({}, {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 1.0})}, IllegalComposition, "optimizer="),
    ],
)
def test_what_has_no_equal_is_refused(tmp_path, changed, extra, error, message):
    with pytest.raises(error, match=message):
        trainer(Trainer, tmp_path, llama, extra, **changed).train()


class OwnOptimizer(Trainer):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        return self.optimizer


class OwnScheduler(Trainer):
    def create_scheduler(self, num_training_steps, optimizer=None):
        self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer)
        return self.lr_scheduler


@pytest.mark.parametrize("kind", [OwnOptimizer, OwnScheduler])
def test_optimizers_that_a_subclass_makes_are_refused(tmp_path, kind):
    """They would be stepped, and would move nothing."""
    with pytest.raises(IllegalComposition, match="optimizer="):
        trainer(kind, tmp_path, llama).train()


def test_an_optimizer_of_ones_own(tmp_path):
    """Then the arguments' is neither read nor refused."""
    trained = trainer(Trainer, tmp_path, llama, {"optimizer": sl.optim.lion(1e-3)}, optim="galore_adamw")
    trained.train()
    losses = [entry["loss"] for entry in logs(trained) if "loss" in entry]
    assert losses[-1] < losses[0]

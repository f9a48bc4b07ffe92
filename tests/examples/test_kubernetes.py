"""The manifests in examples/kubernetes: what an API server takes, and commands that train on two hosts."""

import copy
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
CHECKER = jsonschema.Draft202012Validator(json.loads(Path(__file__).with_name("kubernetes.schema.json").read_text()))
SIZES = {"steps": 3, "layers": 1, "width": 16, "heads": 2, "sequence": 16, "batch": 4, "precision": "fp32"}
SMALL = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]


def manifest(name):
    return yaml.safe_load((ROOT / "examples" / "kubernetes" / name).read_text())


def pod(document):
    """The template of the document's pods, and how many there are."""
    if document["kind"] == "JobSet":
        (jobs,) = document["spec"]["replicatedJobs"]
        job = jobs["template"]["spec"]
        return job["template"]["spec"], jobs["replicas"] * job["completions"]
    worker = document["spec"]["pytorchReplicaSpecs"]["Worker"]
    return worker["template"]["spec"], worker["replicas"]


def test_the_manifests_are_what_an_api_server_takes():
    assert [file.name for file in FILES] == ["jobset.yaml", "pytorchjob.yaml", "runs.yaml"]
    for file in FILES:
        document = yaml.safe_load(file.read_text())
        CHECKER.validate(document)
        for path in (["spec"], ["metadata"]):  # a field that nobody knows is noticed
            wrong = copy.deepcopy(document)
            wrong[path[0]]["nproc"] = 8
            assert not CHECKER.is_valid(wrong)


@pytest.mark.parametrize("name", ["jobset.yaml", "pytorchjob.yaml"])
def test_a_manifest_agrees_with_itself(name):
    """Volumes that are mounted exist, the claim is that of runs.yaml, and the save has less time than the pod."""
    document = manifest(name)
    template, hosts = pod(document)
    (container,) = template["containers"]
    volumes = {volume["name"]: volume for volume in template["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert mounts["/runs"]["persistentVolumeClaim"]["claimName"] == manifest("runs.yaml")["metadata"]["name"]
    (shutdown,) = (int(each["value"]) for each in container["env"] if each["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    assert shutdown < template["terminationGracePeriodSeconds"]
    words = container["command"] + container["args"]
    assert re.match("/runs/", words[words.index("--out") + 1])
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    (port,) = (each["containerPort"] for each in container["ports"])
    if name == "jobset.yaml":
        (jobs,) = document["spec"]["replicatedJobs"]
        # A pod's name: of the set, of the replicated job, the job's index, the pod's; the service's name is the subdomain.
        head = f"{document['metadata']['name']}-{jobs['name']}-0-0.{document['spec']['network']['subdomain']}"
        assert {f"--nnodes={hosts}", f"--nproc-per-node={gpus}", f"--rdzv-endpoint={head}:{port}"} < set(words)
    else:
        assert document["spec"]["nprocPerNode"] == str(gpus)
        elastic = document["spec"]["elasticPolicy"]
        assert elastic["minReplicas"] == elastic["maxReplicas"] == hosts
        assert (container["name"], container["ports"][0]["name"]) == ("pytorch", "pytorchjob-port")


def environment(document, endpoint):
    """The variables that Kubeflow's training operator gives a pod of an elastic PyTorchJob."""
    elastic = document["spec"]["elasticPolicy"]
    return {
        "PET_RDZV_ENDPOINT": endpoint,
        "PET_RDZV_BACKEND": elastic["rdzvBackend"],
        "PET_RDZV_ID": elastic["rdzvId"],
        "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
        "PET_MAX_RESTARTS": str(elastic["maxRestarts"]),
        "PET_NPROC_PER_NODE": "1",  # of the eight
        "PYTHONUNBUFFERED": "1",
    }


@pytest.mark.parametrize("name", ["jobset.yaml", "pytorchjob.yaml"])
def test_the_command_trains_on_two_hosts(name, tmp_path):
    """As two torchruns on this host, with a process each and a small model. The set's pods are made anew, and it goes on."""
    document = manifest(name)
    template, hosts = pod(document)
    (container,) = template["containers"]
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 500)

    def train(*more):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
        words = [*container["command"], *container["args"], *SMALL, *more]
        words = [word.replace("/runs", str(tmp_path)) for word in words]
        words = [re.sub(r"(?<=^--nproc-per-node=)\d+", "1", word) for word in words]
        words = [re.sub(r"(?<=^--rdzv-endpoint=).+", endpoint, word) for word in words]
        assert words[0] == "torchrun"
        words[0] = str(Path(sys.executable).with_name("torchrun"))
        variables = {each["name"]: each["value"] for each in container["env"]}
        variables |= environment(document, endpoint) if name == "pytorchjob.yaml" else {}
        variables |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        files = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        pods = [subprocess.Popen(words, env=os.environ | variables, **files) for _ in range(hosts)]
        said = [each.communicate(timeout=200)[0] for each in pods]
        assert [each.returncode for each in pods] == [0] * hosts, said
        (head,) = (each for each in said if "Plan on" in each)
        return head

    assert "Plan on data=2" in train() and (tmp_path / "first").is_dir()
    if name == "jobset.yaml":
        again = train("--steps", "5")
        assert re.search(r"resuming from .*step-0+3\b", again) and "step 5/5" in again

"""The Kubernetes manifest has the documented fields of a TFJob and no others."""

from pathlib import Path

import pytest
import yaml

MANIFEST = Path(__file__).parents[3] / "docs/examples/cluster/tfjob.yaml"

# https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/tensorflow/
FIELDS = {
    "spec": {"runPolicy", "successPolicy", "tfReplicaSpecs", "enableDynamicWorker"},
    "runPolicy": {
        "cleanPodPolicy",
        "ttlSecondsAfterFinished",
        "activeDeadlineSeconds",
        "backoffLimit",
        "schedulingPolicy",
        "suspend",
    },
    "replica": {"replicas", "template", "restartPolicy"},
}
CHOICES = {
    "cleanPodPolicy": {"None", "All", "Running"},
    "successPolicy": {"", "AllWorkers"},
    "restartPolicy": {"Always", "OnFailure", "Never", "ExitCode"},
    "replica types": {"PS", "Worker", "Chief", "Master", "Evaluator"},
}


@pytest.fixture(scope="module")
def documents():
    assert MANIFEST.exists(), "run the tests from a checkout: examples are under docs"
    return list(yaml.safe_load_all(MANIFEST.read_text()))


def test_the_manifest_is_a_tfjob_with_documented_fields(documents):
    job = documents[0]
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "TFJob")
    spec = job["spec"]
    assert spec.keys() <= FIELDS["spec"]
    assert spec["runPolicy"].keys() <= FIELDS["runPolicy"]
    assert spec["runPolicy"]["cleanPodPolicy"] in CHOICES["cleanPodPolicy"]
    assert spec["successPolicy"] in CHOICES["successPolicy"]
    assert spec["tfReplicaSpecs"].keys() <= CHOICES["replica types"]
    for replica in spec["tfReplicaSpecs"].values():
        assert replica.keys() == FIELDS["replica"]
        assert replica["restartPolicy"] in CHOICES["restartPolicy"]
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "tensorflow"
        assert "train.py" in container["command"]


def test_the_manifest_keeps_others_away_from_the_servers(documents):
    policy = documents[1]
    assert policy["kind"] == "NetworkPolicy"
    label = documents[0]["spec"]["tfReplicaSpecs"]["PS"]["template"]["metadata"][
        "labels"
    ]
    assert policy["spec"]["podSelector"]["matchLabels"] == label
    assert policy["spec"]["ingress"] == [
        {"from": [{"podSelector": {"matchLabels": label}}]}
    ]

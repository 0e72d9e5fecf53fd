"""Values that the chart is rendered for."""

from __future__ import annotations

from typing import Any

import yaml
from chart import CHART

EVERYTHING: dict[str, Any] = {
    "image": {"repository": "registry.example.org/baton", "tag": "1", "pullSecrets": ["pull"]},
    "model": {
        "name": "/models/mine",
        "volume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
    },
    "huggingFace": {
        "cache": {"persistentVolumeClaim": {"claimName": "cache"}},
        "offline": True,
        "token": {"existingSecret": "hf", "key": "mine"},
    },
    "clusterSecret": {"existingSecret": "our-cluster"},
    "clusterTls": {"existingSecret": "our-tls", "name": "all.baton"},
    "apiKeys": {"existingSecret": "our-keys"},
    "options": {"log_format": "text", "log_level": "debug"},
    "gateway": {
        "replicas": 3,
        "options": {"probe_every": 60, "max_requests": 2000000},
        "drainSeconds": 600,
        "preStopSeconds": 20,
        "tls": {"existingSecret": "public-tls"},
        "service": {"type": "LoadBalancer", "annotations": {"example.org/internal": "true"}},
        "annotations": {"example.org/a": "b"},
    },
    "workers": {
        "options": {"kv_tokens": 1048576, "overlap": False, "transports": ["shm", "grpc"], "eviction": "lfu"},
        "hostSharedMemory": True,
        "drainSeconds": 7.5,
        "autoscaling": {"enabled": True},
        "pod": {
            "nodeSelector": {"pool": "inference"},
            "priorityClassName": "high",
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
            ],
        },
    },
    "prefill": {"options": {"token_budget": 1024, "eviction": None}, "autoscaling": {"maxReplicas": 3}},
    "encode": {
        "replicas": 2,
        "options": {"embeddings_mib": 2048, "transports": ["shm", "grpc"]},
        "hostSharedMemory": True,
    },
    "decode": {"replicas": 5, "options": {"watermark": 0.05}, "disruption": {"maxUnavailable": "50%"}},
    "networkPolicy": {
        "clients": [{"namespaceSelector": {"matchLabels": {"team": "web"}}}],
        "metrics": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
    },
}

SETS: dict[str, tuple[str, dict[str, Any]]] = {
    "defaults": ("baton", {}),
    "gpu": ("llm", yaml.safe_load((CHART / "values-gpu.yaml").read_text())),
    "aggregated": ("one", {"prefill": {"replicas": 0}}),
    "open": (
        "o" * 53,
        {
            "apiKeys": {"enabled": False},
            "networkPolicy": {"enabled": False},
            "workers": {"disruption": {"enabled": False}},
        },
    ),
    "everything": ("baton", EVERYTHING),
    "ranks": (
        "baton",
        {
            "prefill": {"options": {"tp": 2}},
            "decode": {
                "hosts": 2,
                "options": {"tp": 4},
                "autoscaling": {"enabled": True},
            },
            "networkPolicy": {"metrics": [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]},
        },
    ),
    "pool": (
        "baton-a",
        {
            "inferencePool": {
                "name": "405",  # no number
                "endpointPicker": {"failureMode": "FailOpen"},
                "route": {
                    "parentRefs": [{"name": "public", "namespace": "gateways", "sectionName": "https"}],
                    "hostnames": ["llm.example.org"],
                },
            },
            "gateway": {"replicas": 1},
            "apiKeys": {"existingSecret": "our-keys"},
            "workers": {"autoscaling": {"enabled": True, "prometheus": "http://prometheus.monitoring:9090"}},
        },
    ),
    "cell": (
        "baton-b",
        {
            "inferencePool": {"name": "405", "create": False},
            "gateway": {"replicas": 1},
            "apiKeys": {"existingSecret": "our-keys"},
        },
    ),
    "route": (
        "baton",
        {
            "inferencePool": {
                "name": "406",
                "create": False,
                "route": {"parentRefs": [{"name": "public"}]},
            }
        },
    ),
}
"""Name -> release name and values."""

REFUSED: dict[str, dict[str, Any]] = {
    "gatway": {"gatway": {"replicas": 2}},
    "port": {"workers": {"options": {"port": 1}}},
    "replicas": {"decode": {"replicas": 0}},
    "containers": {"workers": {"pod": {"containers": []}}},
    "pullPolicy": {"image": {"pullPolicy": "sometimes"}},
    "drainSeconds": {"gateway": {"drainSeconds": "long"}},
    "metrics": {"decode": {"autoscaling": {"metrics": {"baton_waiting": "soon"}}}},
    "inferencePool": {"inferencePool": {"name": "Not a name"}},
    "maxUnavailable": {"decode": {"disruption": {"maxUnavailable": 0}}},
    "hosts": {"decode": {"hosts": 0}},
    "nnodes": {"decode": {"options": {"nnodes": 2}}},
    "volume": {"model": {"volume": {"emptyDir": {}, "hostPath": {"path": "/x"}}}},
}
"""What Helm must say -> values that values.schema.json must refuse."""

APART: dict[str, dict[str, Any]] = {
    "decode.autoscaling.metrics is empty": {
        "workers": {"autoscaling": {"enabled": True}},
        "decode": {"autoscaling": {"metrics": {"baton_kv_usage": None, "baton_wait_seconds": None}}},
    },
    "set inferencePool.name": {"inferencePool": {"route": {"parentRefs": [{"name": "public"}]}}},
}
"""What Helm must say -> values that do not go together."""

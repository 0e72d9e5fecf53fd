"""Schemas of those custom resources that the chart makes, with the fields that it uses and no others."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def exactly(required: Schema, **optional: Schema) -> Schema:
    """Of an object with these fields and no others."""
    return {
        "type": "object",
        "properties": required | optional,
        "required": list(required),
        "additionalProperties": False,
    }


def listed(item: Schema, most: int) -> Schema:
    return {"type": "array", "items": item, "minItems": 1, "maxItems": most}


def resource(version: str, kind: str, spec: Schema) -> Schema:
    metadata = exactly({"name": {"type": "string"}}, labels=TEXTS)
    return exactly(
        {"apiVersion": {"const": version}, "kind": {"const": kind}, "metadata": metadata, "spec": spec}
    )


COUNT: Schema = {"type": "integer", "minimum": 0}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 253}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}

AMOUNT: Schema = {"anyOf": [COUNT, {"type": "string", "pattern": "^[0-9]+%$"}]}
ROLLING = exactly({}, partition=COUNT, maxUnavailable=AMOUNT, maxSurge=AMOUNT)
TEMPLATE = exactly(
    {"workerTemplate": {"type": "object"}},
    leaderTemplate={"type": "object"},
    size={"type": "integer", "minimum": 1},
    restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
)
LEADER_WORKER_SET = resource(
    "leaderworkerset.x-k8s.io/v1",
    "LeaderWorkerSet",
    exactly(
        {"leaderWorkerTemplate": TEMPLATE},
        replicas=COUNT,
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        rolloutStrategy=exactly({"type": {"const": "RollingUpdate"}}, rollingUpdateConfiguration=ROLLING),
    ),
)
"""As of LeaderWorkerSet 0.7; pods are Kubernetes' own."""

INFERENCE_POOL = resource(
    "inference.networking.k8s.io/v1",
    "InferencePool",
    exactly(
        {
            "selector": exactly({"matchLabels": TEXTS}),
            "targetPorts": listed(exactly({"number": PORT}), 8),
            "endpointPickerRef": exactly(
                {"name": NAME, "port": exactly({"number": PORT})},
                failureMode={"enum": ["FailOpen", "FailClose"]},
            ),
        }
    ),
)
"""As of the Gateway API inference extension 1.0. A port is required where the picker is a Service."""

MATCH = exactly({"path": exactly({"type": {"enum": ["Exact", "PathPrefix"]}, "value": NAME})})
BACKEND = exactly(
    {"group": {"const": "inference.networking.k8s.io"}, "kind": {"const": "InferencePool"}, "name": NAME}
)
DURATION: Schema = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
HTTP_ROUTE = resource(
    "gateway.networking.k8s.io/v1",
    "HTTPRoute",
    exactly(
        {
            "parentRefs": listed(exactly({"name": NAME}, namespace=NAME, sectionName=NAME), 32),
            "rules": listed(
                exactly(
                    {"matches": listed(MATCH, 64), "backendRefs": listed(BACKEND, 16)},
                    timeouts=exactly({"request": DURATION}),
                ),
                16,
            ),
        },
        hostnames=listed(NAME, 16),
    ),
)
"""As of the Gateway API 1.2."""

TRIGGER = exactly(
    {
        "type": {"const": "prometheus"},
        "metadata": exactly(
            {
                "serverAddress": {"type": "string", "pattern": "^https?://"},
                "query": NAME,
                "threshold": {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"},
            },
            ignoreNullValues={"enum": ["true", "false"]},
        ),
    }
)
POLICY = exactly({"type": {"enum": ["Pods", "Percent"]}, "value": COUNT, "periodSeconds": COUNT})
BEHAVIOR = exactly({}, scaleDown=exactly({}, stabilizationWindowSeconds=COUNT, policies=listed(POLICY, 8)))
SCALED_OBJECT = resource(
    "keda.sh/v1alpha1",
    "ScaledObject",
    exactly(
        {
            "scaleTargetRef": exactly({"name": NAME}, apiVersion=NAME, kind=NAME),
            "triggers": listed(TRIGGER, 8),
        },
        minReplicaCount=COUNT,
        maxReplicaCount=COUNT,
        advanced=exactly({}, horizontalPodAutoscalerConfig=exactly({}, behavior=BEHAVIOR)),
    ),
)
"""As of KEDA 2.16. The metadata of a trigger are texts."""

SCHEMAS = {
    "LeaderWorkerSet": LEADER_WORKER_SET,
    "InferencePool": INFERENCE_POOL,
    "HTTPRoute": HTTP_ROUTE,
    "ScaledObject": SCALED_OBJECT,
}
"""By kind."""

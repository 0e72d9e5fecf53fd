{{/*
Workers on several hosts each: a group of pods a worker, by LeaderWorkerSet. Takes a pod's dict.

Its controller tells each pod its place (LWS_WORKER_INDEX) and the first one's address (LWS_LEADER_ADDRESS). If a pod of a
group ends, all are made anew: so end the ranks of a worker.

The role's headless service must have the set's name: the controller makes one of this name unless it exists, and the
first one's address lies in it.
*/}}
{{- define "baton.workerset" -}}
{{- $it := include "baton.settings" . | fromJson -}}
{{- $name := printf "%s-%s" (include "baton.fullname" .root) .role }}
{{- if gt (len $name) 48 }}
{{- fail (printf "%s is too long a name for pods of workers on several hosts: give the release a shorter one" $name) }}
{{- end }}
{{- $flags := list (printf "--nnodes=%d" (int $it.hosts)) "--node-rank=$(LWS_WORKER_INDEX)" "--master=$(LWS_LEADER_ADDRESS):29500" }}
{{- $pod := mergeOverwrite (dict) . (dict "flags" (concat .flags $flags)) -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  name: {{ $name }}
  labels:
    {{- include "baton.labels" . | nindent 4 }}
spec:
  {{- if not $it.autoscaling.enabled }}
  replicas: {{ $it.replicas }}
  {{- end }}
  startupPolicy: LeaderCreated
  rolloutStrategy:
    type: RollingUpdate
    rollingUpdateConfiguration:
      {{- toYaml $it.rollingUpdate | nindent 6 }}
  leaderWorkerTemplate:
    size: {{ $it.hosts }}
    restartPolicy: RecreateGroupOnPodRestart
    leaderTemplate:
      {{- include "baton.pod" $pod | nindent 6 }}
    workerTemplate:
      {{- include "baton.pod" (mergeOverwrite (dict) $pod (dict "follower" true)) | nindent 6 }}
{{- end }}

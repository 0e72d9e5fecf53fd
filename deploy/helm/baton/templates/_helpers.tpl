{{/* Names are cut so that the longest suffix, -tokenizer, still fits into a DNS label. */}}
{{- define "baton.fullname" -}}
{{- $name := .Release.Name }}
{{- if not (contains .Chart.Name $name) }}{{ $name = printf "%s-%s" $name .Chart.Name }}{{ end }}
{{- $name | trunc 52 | trimSuffix "-" }}
{{- end }}

{{/* Labels that select the pods of a role. Call with (dict "root" $ "role" ROLE). */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "baton.clusterSecretName" -}}
{{ .Values.clusterSecret.existingSecret | default (printf "%s-cluster" (include "baton.fullname" .)) }}
{{- end }}

{{- define "baton.apiKeysName" -}}
{{ .Values.apiKeys.existingSecret | default (printf "%s-api-keys" (include "baton.fullname" .)) }}
{{- end }}

{{/* Default ports of `baton serve`, as JSON. */}}
{{- define "baton.ports" -}}
{{- toJson (get (dict
  "gateway" (dict "grpc" 50050 "http" 8000)
  "tokenizer" (dict "grpc" 50051 "http" 51051)
  "prefill" (dict "grpc" 50061 "http" 51061)
  "decode" (dict "grpc" 50071 "http" 51071)
  "encode" (dict "grpc" 50081 "http" 51081)) .) }}
{{- end }}

{{/* Where workers fetch the images of prompts from a gateway. */}}
{{- define "baton.picturesPort" -}}50052{{- end }}

{{/* Settings of a role, as JSON: prefill and decode take those of `workers` too. */}}
{{- define "baton.settings" -}}
{{- $own := get .root.Values .role }}
{{- if has .role (list "prefill" "decode") }}
{{- $own = mergeOverwrite (deepCopy .root.Values.workers) $own }}
{{- end }}
{{- toJson $own }}
{{- end }}

{{/* "true": each worker of the role is a group of pods, of which the first one serves. Takes a dict with root and role. */}}
{{- define "baton.grouped" -}}
{{- gt (int (include "baton.settings" . | fromJson).hosts) 1 }}
{{- end }}

{{/* Labels that select those pods of a role that serve. */}}
{{- define "baton.serving" -}}
{{ include "baton.selector" . }}
{{- if eq (include "baton.grouped" .) "true" }}
leaderworkerset.sigs.k8s.io/worker-index: "0"
{{- end }}
{{- end }}

{{/* "true": the role's workers have several ranks, which share a pool in /dev/shm. */}}
{{- define "baton.ranked" -}}
{{- $options := mergeOverwrite (deepCopy .root.Values.options) ((include "baton.settings" . | fromJson).options | default dict) }}
{{- gt (int $options.tp) 1 }}
{{- end }}

{{/* The volume of a pod's /dev/shm; empty: the container's own, which holds 64 MiB. What is in an emptyDir counts as the
pod's memory. */}}
{{- define "baton.sharedMemory" -}}
{{- if (include "baton.settings" . | fromJson).hostSharedMemory -}}
hostPath: {path: /dev/shm, type: Directory}
{{- else if and (has .role (list "prefill" "decode")) (eq (include "baton.ranked" .) "true") -}}
emptyDir: {medium: Memory}
{{- end }}
{{- end }}

{{/* Options of `baton serve` as flags, in JSON. A number keeps its digits: 1048576, not 1.048576e+06. */}}
{{- define "baton.flags" -}}
{{- $flags := list }}
{{- range $name, $value := . }}
{{- $flag := replace "_" "-" $name }}
{{- if kindIs "bool" $value }}
{{- $flags = append $flags (printf "--%s%s" (ternary "" "no-" $value) $flag) }}
{{- else if kindIs "slice" $value }}
{{- $flags = append $flags (printf "--%s=%s" $flag (join "," $value)) }}
{{- else if not (kindIs "invalid" $value) }}
{{- $flags = append $flags (printf "--%s=%s" $flag (kindIs "string" $value | ternary $value (toJson $value))) }}
{{- end }}
{{- end }}
{{- toJson $flags }}
{{- end }}

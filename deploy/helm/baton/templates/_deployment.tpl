{{/* The Deployment of a role. Takes a pod's dict. */}}
{{- define "baton.deployment" -}}
{{- $it := include "baton.settings" . | fromJson -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "baton.fullname" .root }}-{{ .role }}
  labels:
    {{- include "baton.labels" . | nindent 4 }}
spec:
  {{- if not (and $it.autoscaling $it.autoscaling.enabled) }}
  replicas: {{ $it.replicas }}
  {{- end }}
  # Longer than the start of any pod: a gateway is ready only after a decode node.
  progressDeadlineSeconds: {{ add (max (int $it.startupSeconds) (int .root.Values.workers.startupSeconds)) 300 }}
  strategy:
    type: RollingUpdate
    rollingUpdate:
      {{- toYaml $it.rollingUpdate | nindent 6 }}
  selector:
    matchLabels:
      {{- include "baton.selector" . | nindent 6 }}
  template:
    {{- include "baton.pod" . | nindent 4 }}
{{- end }}

{{/* The headless service by whose name a role's pods are found. Takes a dict with root and role. */}}
{{- define "baton.headless" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "baton.fullname" .root }}-{{ .role }}
  labels:
    {{- include "baton.labels" . | nindent 4 }}
spec:
  clusterIP: None
  # Pods that load or drain too: Baton's processes check that themselves. A decode node that drains must stay in
  # the answers, or its requests would be moved to other nodes.
  publishNotReadyAddresses: true
  selector:
    {{- include "baton.serving" . | nindent 4 }}
  ports:
    - {name: grpc, port: {{ (include "baton.ports" .role | fromJson).grpc }}, targetPort: grpc, appProtocol: grpc}
    - {name: http, port: {{ (include "baton.ports" .role | fromJson).http }}, targetPort: http}
{{- end }}

{{/* dns:SERVICE:PORT, for the flags of processes that use the role. Takes a dict with root and role. */}}
{{- define "baton.found" -}}
dns:{{ include "baton.fullname" .root }}-{{ .role }}:{{ (include "baton.ports" .role | fromJson).grpc }}
{{- end }}

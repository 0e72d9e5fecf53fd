{{/*
The pod of a role. Call with (dict "root" $ "role" ROLE "flags" LIST): the flags stand before those of `options`.
With "follower" true: a further pod of a worker on several hosts, which serves nothing.

The image's entry point stays: it gives the process an id that no other pod's has, as CUDA IPC needs.
*/}}
{{- define "baton.pod" -}}
{{- $values := .root.Values }}
{{- $ports := include "baton.ports" .role | fromJson }}
{{- $it := include "baton.settings" . | fromJson }}
{{- $options := mergeOverwrite (deepCopy $values.options) $it.options }}
{{- $preStop := int $it.preStopSeconds -}}
metadata:
  labels:
    {{- include "baton.labels" . | nindent 4 }}
    {{- if and (eq .role "gateway") $values.inferencePool.name }}
    app.kubernetes.io/part-of: {{ quote $values.inferencePool.name }}
    {{- end }}
  {{- with $it.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  automountServiceAccountToken: false
  # Otherwise a service named baton sets BATON_PORT and the like, which are Baton's own variables.
  enableServiceLinks: false
  # The drain, the stop after it (10 s at most), and a margin.
  terminationGracePeriodSeconds: {{ add $preStop (ceil $it.drainSeconds) 20 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with $it.pod }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  containers:
    - name: {{ .role }}
      image: "{{ $values.image.repository }}:{{ $values.image.tag }}"
      imagePullPolicy: {{ $values.image.pullPolicy }}
      args:
        - baton
        - serve
        - {{ .role }}
        - --advertise=$(POD_IP):{{ $ports.grpc }}
        - --drain-seconds={{ $it.drainSeconds }}
        {{- range concat .flags (include "baton.flags" $options | fromJsonArray) }}
        - {{ quote . }}
        {{- end }}
      env:
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- include "baton.env" . | nindent 8 }}
        {{- range $name, $value := $it.env }}
        - name: {{ $name }}
          value: {{ quote $value }}
        {{- end }}
      {{- if not .follower }}
      ports:
        - {name: grpc, containerPort: {{ $ports.grpc }}}
        - {name: http, containerPort: {{ $ports.http }}}
      {{- include "baton.probes" (dict "root" .root "role" .role "port" $ports.grpc "settings" $it) | nindent 6 }}
      {{- end }}
      {{- if $preStop }}
      lifecycle:
        preStop:
          exec: {command: [sleep, {{ quote $preStop }}]}
      {{- end }}
      resources:
        {{- toYaml $it.resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      volumeMounts:
        {{- include "baton.mounts" . | nindent 8 }}
  volumes:
    {{- include "baton.volumes" . | nindent 4 }}
{{- end }}

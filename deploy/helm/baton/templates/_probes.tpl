{{/*
Health needs no secret. The kubelet's gRPC probe has no TLS. With TLS workers are probed by `baton health`, and the
gateway over HTTPS, whose certificate the kubelet does not check.

A restart does not help a gateway without a decode node. So its startup and liveness probes only check its port. A worker
or tokenizer that has not served for three minutes hangs, or was drained for good.

`baton health` waits 3 s for the answer; the rest of its time is for Python to start where all cores are busy.
*/}}
{{- define "baton.probes" -}}
{{- $serves := dict "grpc" (dict "port" (int .port)) }}
{{- if eq .role "gateway" }}
{{- $scheme := ternary "HTTPS" "HTTP" (not (empty .settings.tls.existingSecret)) }}
{{- $serves = dict "httpGet" (dict "path" "/health" "port" "http" "scheme" $scheme) }}
{{- else if .root.Values.clusterTls.existingSecret }}
{{- $serves = dict "exec" (dict "command" (list "baton" "health" (printf "127.0.0.1:%d" (int .port)))) }}
{{- end }}
{{- $seconds := hasKey $serves "exec" | ternary 20 5 }}
{{- $lives := eq .role "gateway" | ternary (dict "tcpSocket" (dict "port" "grpc")) $serves -}}
startupProbe:
  {{- toYaml $lives | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: {{ $seconds }}
  failureThreshold: {{ div (add (int .settings.startupSeconds) 4) 5 }}
readinessProbe:
  {{- toYaml $serves | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: {{ $seconds }}
  failureThreshold: 2
livenessProbe:
  {{- toYaml $lives | nindent 2 }}
  periodSeconds: 20
  timeoutSeconds: {{ max 10 $seconds }}
  failureThreshold: 9
{{- end }}

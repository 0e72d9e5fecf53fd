{{/*
Health is asked without a secret: that door is open. The kubelet's own gRPC probe knows no TLS, so `baton health` asks
where workers speak it, and HTTPS, whose certificate the kubelet does not check, where the gateway does.

A gateway that can serve nothing, for want of a decode node, is not made better by a restart: it has started, and lives,
while its port can be reached. A worker or tokenizer that has not served for three minutes hangs, or was told to drain
for good.
*/}}
{{- define "baton.probes" -}}
{{- $serves := dict "grpc" (dict "port" (int .port)) }}
{{- if eq .role "gateway" }}
{{- $scheme := ternary "HTTPS" "HTTP" (not (empty .settings.tls.existingSecret)) }}
{{- $serves = dict "httpGet" (dict "path" "/health" "port" "http" "scheme" $scheme) }}
{{- else if .root.Values.clusterTls.existingSecret }}
{{- $serves = dict "exec" (dict "command" (list "baton" "health" (printf "127.0.0.1:%d" (int .port)))) }}
{{- end }}
{{- $lives := eq .role "gateway" | ternary (dict "tcpSocket" (dict "port" "grpc")) $serves -}}
startupProbe:
  {{- toYaml $lives | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add (int .settings.startupSeconds) 4) 5 }}
readinessProbe:
  {{- toYaml $serves | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  {{- toYaml $lives | nindent 2 }}
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 9
{{- end }}

{{/* Files of a role's pods: variables that name them, mounts, volumes. All take a pod's dict. */}}
{{- define "baton.env" -}}
{{- $values := .root.Values -}}
{{- $gateway := eq .role "gateway" -}}
- name: BATON_CLUSTER_SECRET_FILE
  value: /etc/baton/cluster/secret
{{- if not $values.clusterTls.existingSecret }}
# Without TLS between the pods the secret is sent in clear over the pod network.
- name: BATON_CLUSTER_SECRET_IN_CLEAR
  value: "true"
{{- end }}
{{- if $values.clusterTls.existingSecret }}
- name: BATON_CLUSTER_CERT
  value: /etc/baton/cluster-tls/tls.crt
- name: BATON_CLUSTER_KEY
  value: /etc/baton/cluster-tls/tls.key
- name: BATON_CLUSTER_CA
  value: /etc/baton/cluster-tls/ca.crt
- name: BATON_CLUSTER_TLS_NAME
  value: {{ quote $values.clusterTls.name }}
{{- end }}
{{- if and $gateway $values.apiKeys.enabled }}
- name: BATON_API_KEYS
  value: /etc/baton/api-keys/keys
{{- end }}
{{- if and $gateway $values.gateway.tls.existingSecret }}
- name: BATON_TLS_CERT
  value: /etc/baton/tls/tls.crt
- name: BATON_TLS_KEY
  value: /etc/baton/tls/tls.key
{{- end }}
{{- if not $gateway }}
- name: BATON_MODEL
  value: {{ quote $values.model.name }}
{{- if $values.huggingFace.offline }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- with $values.huggingFace.token }}
{{- if .existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .existingSecret }}, key: {{ .key }}}}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "baton.mounts" -}}
{{- $values := .root.Values -}}
- {name: tmp, mountPath: /tmp}
- {name: cluster, mountPath: /etc/baton/cluster, readOnly: true}
{{- if $values.clusterTls.existingSecret }}
- {name: cluster-tls, mountPath: /etc/baton/cluster-tls, readOnly: true}
{{- end }}
{{- if eq .role "gateway" }}
{{- if $values.apiKeys.enabled }}
- {name: api-keys, mountPath: /etc/baton/api-keys, readOnly: true}
{{- end }}
{{- if $values.gateway.tls.existingSecret }}
- {name: tls, mountPath: /etc/baton/tls, readOnly: true}
{{- end }}
{{- else }}
- {name: huggingface, mountPath: /home/baton/.cache/huggingface}
{{- if $values.model.volume }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}
{{- if has .role (list "prefill" "decode") }}
# Triton compiles kernels into this folder and loads them from it.
- {name: triton, mountPath: /home/baton/.triton}
{{- end }}
{{- if include "baton.sharedMemory" . }}
- {name: shared-memory, mountPath: /dev/shm}
{{- end }}
{{- end }}

{{- define "baton.volumes" -}}
{{- $values := .root.Values -}}
# Readable by the pod's group (fsGroup) only: Baton refuses secrets that all users can read.
- name: cluster
  secret: {secretName: {{ include "baton.clusterSecretName" .root }}, defaultMode: 0440}
- name: tmp
  emptyDir: {}
{{- with $values.clusterTls.existingSecret }}
- name: cluster-tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- if eq .role "gateway" }}
{{- if $values.apiKeys.enabled }}
- name: api-keys
  secret: {secretName: {{ include "baton.apiKeysName" .root }}, defaultMode: 0440}
{{- end }}
{{- with $values.gateway.tls.existingSecret }}
- name: tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- else }}
- name: huggingface
  {{- toYaml ($values.huggingFace.cache | default (dict "emptyDir" dict)) | nindent 2 }}
{{- with $values.model.volume }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- if has .role (list "prefill" "decode") }}
- name: triton
  emptyDir: {}
{{- end }}
{{- with include "baton.sharedMemory" . }}
- name: shared-memory
  {{ . }}
{{- end }}
{{- end }}

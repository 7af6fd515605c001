{{/* Parts of pods. Those that take a pod have it as .pod, and the chart's root as .root. */}}

{{- define "loomserve.labels" -}}
app.kubernetes.io/name: loomserve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "loomserve.secret" -}}
{{ .Values.secrets.existing | default (printf "%s-tokens" .Release.Name) }}
{{- end }}

{{- define "loomserve.image" -}}
{{ .Values.image.repository }}{{ with .Values.image.tag }}:{{ . }}{{ end }}{{ with .Values.image.digest }}@{{ . }}{{ end }}
{{- end }}

{{- define "loomserve.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "loomserve.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "loomserve.placement" -}}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- with merge (dict) ((index .root.Values.placement .pod.name) | default dict) .root.Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/* Memory and cores are asked for as they are bounded, so that nobody else is given them. */}}
{{- define "loomserve.resources" -}}
{{- $memory := index .root.Values.resources.memory .pod.name | default (printf "%dGi" (div (.pod.memory | int64) 1073741824)) }}
{{- $cpus := index .root.Values.resources.cpus .pod.name | default .pod.cpus }}
requests: {cpu: {{ $cpus | int | quote }}, memory: {{ $memory }}}
limits:
  cpu: {{ $cpus | int | quote }}
  memory: {{ $memory }}
{{- if .pod.gpus }}
  {{ .root.Values.resources.gpu }}: {{ .pod.gpus | int | quote }}
{{- end }}
{{- end }}

{{- define "loomserve.env" -}}
- {name: HOME, value: /var/lib/loomserve/home}
- {name: LOOMSERVE_HOME, value: /var/lib/loomserve/home}
- {name: USER, value: loomserve}
- name: LOOMSERVE_ADMIN_TOKEN_HASH
  valueFrom: {secretKeyRef: {name: {{ include "loomserve.secret" .root }}, key: admin-token-hash}}
- name: LOOMSERVE_METRICS_TOKEN_HASH
  valueFrom: {secretKeyRef: {name: {{ include "loomserve.secret" .root }}, key: metrics-token-hash}}
{{- with .root.Values.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "loomserve.mounts" -}}
- {name: config, mountPath: /etc/loomserve, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: shared-memory, mountPath: /dev/shm}
- {name: home, mountPath: /var/lib/loomserve}
{{- if and .root.Values.derived.ssd (ne .pod.name "head") }}
- {name: ssd, mountPath: /var/lib/loomserve/ssd}
{{- end }}
{{- if .root.Values.storage.weights.existingClaim }}
- {name: weights, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{/* All but home, which each kind of pod has its own way. */}}
{{- define "loomserve.volumes" -}}
- name: config
  secret: {secretName: {{ .root.Release.Name }}-config, defaultMode: 0440}
- name: tmp
  emptyDir: {}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: {{ .pod.sharedMemory | int64 | quote }}}
{{- if and .root.Values.derived.ssd (ne .pod.name "head") }}
- name: ssd
  ephemeral:
    volumeClaimTemplate:
      spec: {{ include "loomserve.claim" (dict "size" (.root.Values.derived.ssd | int64 | toString) "storageClass" .root.Values.storage.ssd.storageClass "accessMode" "ReadWriteOnce") | nindent 8 }}
{{- end }}
{{- with .root.Values.storage.weights.existingClaim }}
- name: weights
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "loomserve.claim" -}}
accessModes: [{{ .accessMode }}]
{{- with .storageClass }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .size | quote }}}}
{{- end }}

{{- define "loomserve.ports" -}}
- {name: serve, containerPort: {{ .Values.derived.port | int }}}
{{- with .Values.derived.adminPort }}
- {name: admin, containerPort: {{ . | int }}}
{{- end }}
{{- end }}

{{/* The port's name at which operators and Prometheus ask. */}}
{{- define "loomserve.operatorsPort" -}}
{{ if .Values.derived.adminPort }}admin{{ else }}serve{{ end }}
{{- end }}

{{/* Probes ask for what clients may: the gateway answers once configured models do. */}}
{{- define "loomserve.probe" -}}
httpGet:
  path: /-/healthz
  port: serve
{{- end }}

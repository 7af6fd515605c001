{{/* Parts of the pods that KubeRay starts. */}}

{{- define "loomserve.rayPod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
# Orphans are reaped by the pod's first process, which then is Kubernetes' own.
shareProcessNamespace: true
terminationGracePeriodSeconds: {{ .root.Values.derived.times.grace | int }}
securityContext: {{ include "loomserve.podSecurity" .root | nindent 2 }}
{{- include "loomserve.placement" . }}
{{- end }}

{{- define "loomserve.rayContainer" -}}
image: {{ include "loomserve.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
# KubeRay has the shell run it ahead of ray start.
command: [loomserve, kube, prepare]
securityContext: {{ include "loomserve.containerSecurity" .root | nindent 2 }}
env:
  {{- include "loomserve.env" . | nindent 2 }}
  - name: LOOMSERVE_INTERNAL_TOKEN
    valueFrom: {secretKeyRef: {name: {{ include "loomserve.secret" .root }}, key: internal-token}}
  {{- range $name, $value := .root.Files.Get "files/environment.yaml" | fromYaml }}
  - {name: {{ $name }}, value: {{ $value | quote }}}
  {{- end }}
  - {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: {{ .root.Values.derived.times.rayDrain | int | quote }}}
  {{- if eq .pod.name "head" }}
  # What there is but once has a folder by cluster: two live at once during an upgrade.
  - name: LOOMSERVE_CLUSTER
    valueFrom: {fieldRef: {fieldPath: "metadata.labels['ray.io/cluster']"}}
  - {name: LOOMSERVE_STATE, value: /var/lib/loomserve/clusters/$(LOOMSERVE_CLUSTER)}
  {{- end }}
resources: {{ include "loomserve.resources" . | nindent 2 }}
lifecycle:
  preStop: {sleep: {seconds: {{ .root.Values.derived.times.preStop | int }}}}
volumeMounts: {{ include "loomserve.mounts" . | nindent 2 }}
{{- end }}

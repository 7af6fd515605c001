{{/* What must not be rendered: each with what to do. */}}
{{- define "loomserve.check" -}}
{{- if not .Values.config }}{{ fail "config is missing: helm install ... -f <(loomserve kube values my.yaml)" }}{{ end }}
{{- if ne (.Values.derived.config | default "") (sha256sum .Values.config) }}
{{- fail "derived was made of another configuration: print both anew with loomserve kube values my.yaml" }}
{{- end }}
{{- if ne .Values.derived.mode .Values.mode }}
{{- fail (printf "the configuration is for mode %s: a section cluster makes it one of mode rayservice, and none one of mode node" .Values.derived.mode) }}
{{- end }}
{{- if not .Values.image.repository }}{{ fail "image.repository is missing" }}{{ end }}
{{- if and (not .Values.image.tag) (not .Values.image.digest) }}{{ fail "image.tag or image.digest is missing" }}{{ end }}
{{- if gt (len .Release.Name) 40 }}{{ fail "the release's name is longer than 40 characters, which KubeRay's names do not have room for" }}{{ end }}
{{- range $name, $memory := .Values.resources.memory }}
{{- $pod := include "loomserve.podNamed" (dict "root" $ "name" $name) | fromYaml }}
{{- if not $pod.name }}{{ fail (printf "resources.memory.%s: there is no such pod" $name) }}{{ end }}
{{- if lt (mul (trimSuffix "Gi" $memory | int64) 1073741824) ($pod.memory | int64) }}
{{- fail (printf "resources.memory.%s: the configuration takes %dGi there, shared memory among it" $name (div ($pod.memory | int64) 1073741824)) }}
{{- end }}
{{- end }}
{{- if and (eq .Values.mode "rayservice") (eq .Values.upgrade.strategy "NewCluster") (ne .Values.storage.state.accessMode "ReadWriteMany") }}
{{- fail "upgrade.strategy NewCluster: two heads have the state's claim at once, so storage.state.accessMode must be ReadWriteMany" }}
{{- end }}
{{- if and .Values.monitoring.enabled .Values.derived.adminPort .Values.networkPolicy.enabled (not .Values.networkPolicy.monitoring) }}
{{- fail "networkPolicy.monitoring is missing: server.admin_port is closed to all but its peers, and Prometheus reads metrics there: name its pods" }}
{{- end }}
{{- if and .Values.route.enabled (not .Values.route.parentRefs) }}{{ fail "route.parentRefs is missing: name the Gateway" }}{{ end }}
{{- end }}

{{- define "loomserve.podNamed" -}}
{{- $name := .name }}
{{- range concat .root.Values.derived.nodes (.root.Values.derived.head | list | compact) }}
{{- if eq .name $name }}{{ toYaml . }}{{ end }}
{{- end }}
{{- end }}

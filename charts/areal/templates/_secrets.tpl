{{/* A checksum for pod annotations. It replaces pods after a Secret has changed, because processes read keys and
     certificates only once. Empty if helm renders without a cluster. */}}
{{- define "areal.secretsChecksum" -}}
{{- $found := list }}
{{- range list .Values.auth.existingSecret .Values.tls.existingSecret }}
{{- with . }}{{ with lookup "v1" "Secret" $.Release.Namespace . }}{{ $found = append $found .data }}{{ end }}{{ end }}
{{- end }}
{{- with include "areal.rotated" . }}{{ $found = append $found . }}{{ end }}
{{- with $found }}{{ toJson . | sha256sum }}{{ end }}
{{- end }}

{{/* A checksum of the chart's own Secret, if someone has changed its generated values. Empty otherwise, and at the install,
     when there is no Secret yet. */}}
{{- define "areal.rotated" -}}
{{- if not .Values.auth.existingSecret }}
{{- $live := lookup "v1" "Secret" .Release.Namespace (include "areal.secretName" .) | default dict }}
{{- $made := dig "metadata" "annotations" "areal.io/generated-sha256" "" $live }}
{{- if $made }}{{ $now := toJson $live.data | sha256sum }}{{ if ne $now $made }}{{ $now }}{{ end }}{{ end }}
{{- end }}
{{- end }}

{{/* Annotations of a pod template, if there are any: (list $ component-values). */}}
{{- define "areal.podAnnotations" -}}
{{- $annotations := deepCopy ((index . 1).podAnnotations | default dict) }}
{{- with include "areal.secretsChecksum" (index . 0) }}{{ $_ := set $annotations "checksum/secrets" . }}{{ end }}
{{- with $annotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

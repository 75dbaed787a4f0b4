{{/* A checksum for pod annotations: (list $ job). It replaces pods after a Secret has changed, because processes read keys and
     certificates only once; those of jobs read tokens again. Empty if helm renders without a cluster. */}}
{{- define "areal.secretsChecksum" -}}
{{- $root := index . 0 }}{{ $own := $root.Values.auth.existingSecret }}{{ $found := list }}
{{- range ternary (list $root.Values.tls.existingSecret) (list $own $root.Values.tls.existingSecret) (index . 1) }}
{{- with . }}{{ with lookup "v1" "Secret" $root.Release.Namespace . }}{{ $found = append $found .data }}{{ end }}{{ end }}
{{- end }}
{{- if not (index . 1) }}{{ with include "areal.rotated" $root }}{{ $found = append $found . }}{{ end }}{{ end }}
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

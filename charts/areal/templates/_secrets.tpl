{{/* What replaces pods when a Secret of the user's has changed: processes read keys and certificates once. Empty without a
     cluster to ask. The chart's own Secret is not in it: at the install it is not there yet, and later it never changes. */}}
{{- define "areal.secretsChecksum" -}}
{{- $found := list }}
{{- range list .Values.auth.existingSecret .Values.tls.existingSecret }}
{{- with . }}{{ with lookup "v1" "Secret" $.Release.Namespace . }}{{ $found = append $found .data }}{{ end }}{{ end }}
{{- end }}
{{- with $found }}{{ toJson . | sha256sum }}{{ end }}
{{- end }}

{{/* Annotations of a pod template, or nothing: (list $ component-values). */}}
{{- define "areal.podAnnotations" -}}
{{- $annotations := deepCopy ((index . 1).podAnnotations | default dict) }}
{{- with include "areal.secretsChecksum" (index . 0) }}{{ $_ := set $annotations "checksum/secrets" . }}{{ end }}
{{- with $annotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

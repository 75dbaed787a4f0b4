{{/* The sandbox service: the experiment asks for it, by `sandbox.boxes` and no `endpoints.sandbox`. */}}

{{/* The experiment with the service's addresses: (list $ experiment) */}}
{{- define "areal.withSandbox" -}}
{{- $config := index . 1 }}{{ $name := include "areal.name" (list (index . 0) "sandbox") }}
{{- if and (gt (dig "sandbox" "boxes" 0 $config | int) 0) (not (dig "endpoints" "sandbox" "" $config)) }}
{{- $own := dict "sandbox" (printf "%s:50051" $name) "sandbox_http" (printf "http://%s:8080" $name) }}
{{- $_ := mustMergeOverwrite $config (dict "endpoints" $own) }}
{{- end }}
{{- toYaml $config }}
{{- end }}

{{/* Whether the service is one of this release. Takes $. */}}
{{- define "areal.sandboxHere" -}}
{{- $config := include "areal.experiment" . | fromYaml }}
{{- $own := printf "%s:50051" (include "areal.name" (list . "sandbox")) }}
{{- if and (gt (dig "sandbox" "boxes" 0 $config | int) 0) (eq (dig "endpoints" "sandbox" "" $config) $own) }}true{{ end }}
{{- end }}

{{/* The sandbox service is deployed if the experiment's `sandbox.boxes` is above 0 and its `endpoints.sandbox` is empty. */}}

{{/* Adds the service's addresses to an experiment: (list $ experiment) */}}
{{- define "areal.withSandbox" -}}
{{- $config := index . 1 }}{{ $name := include "areal.name" (list (index . 0) "sandbox") }}
{{- if and (gt (dig "sandbox" "boxes" 0 $config | int) 0) (not (dig "endpoints" "sandbox" "" $config)) }}
{{- $own := dict "sandbox" (printf "%s:50051" $name) "sandbox_http" (printf "http://%s:8080" $name) }}
{{- $_ := mustMergeOverwrite $config (dict "endpoints" $own) }}
{{- end }}
{{- toYaml $config }}
{{- end }}

{{/* `true` if this release deploys the service. Takes $. */}}
{{- define "areal.sandboxHere" -}}
{{- $config := include "areal.experiment" . | fromYaml }}
{{- $own := printf "%s:50051" (include "areal.name" (list . "sandbox")) }}
{{- if and (gt (dig "sandbox" "boxes" 0 $config | int) 0) (eq (dig "endpoints" "sandbox" "" $config) $own) }}true{{ end }}
{{- end }}

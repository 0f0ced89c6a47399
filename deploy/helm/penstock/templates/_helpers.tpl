{{- define "penstock.name" -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "penstock.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "penstock.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "penstock.metadata" -}}
name: {{ include "penstock.name" . }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "penstock.labels" . | nindent 2 }}
{{- end -}}

{{- define "penstock.image" -}}
{{- $variant := ternary "cuda" "cpu" .Values.gpu.enabled -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (printf "%s-%s" .Chart.AppVersion $variant) }}
{{- end -}}

{{- define "penstock.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "penstock.name" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{- define "penstock.claim" -}}
{{- .Values.cache.persistence.existingClaim | default (printf "%s-cache" (include "penstock.name" .)) -}}
{{- end -}}

{{/* The port and the Service that have /metrics. */}}
{{- define "penstock.metricsPort" -}}
{{- ternary "admin" "http" .Values.admin.enabled -}}
{{- end -}}

{{- define "penstock.metricsService" -}}
{{- include "penstock.name" . }}{{ ternary "-admin" "" .Values.admin.enabled -}}
{{- end -}}

{{/* The configuration file of the server. */}}
{{- define "penstock.config" -}}
{{- range $key := list "host" "port" "drain" "models" "api_key_file" "admin_host" "admin_port" "admin_key_file" "config" -}}
{{- if hasKey $.Values.config $key -}}
{{- fail (printf "config.%s is set by the chart; see drainSeconds, models, apiKeys and admin in values.yaml" $key) -}}
{{- end -}}
{{- end -}}
{{- $set := dict "host" "0.0.0.0" "port" 8000 "drain" .Values.drainSeconds "models" .Values.models -}}
{{- if .Values.apiKeys.existingSecret -}}
{{- $_ := set $set "api_key_file" (printf "/etc/penstock/keys/%s" .Values.apiKeys.key) -}}
{{- end -}}
{{- if .Values.admin.enabled -}}
{{- $_ := set $set "admin_host" "0.0.0.0" -}}
{{- $_ := set $set "admin_port" .Values.admin.port -}}
{{- end -}}
{{- if .Values.admin.existingSecret -}}
{{- $_ := set $set "admin_key_file" (printf "/etc/penstock/admin-keys/%s" .Values.admin.key) -}}
{{- end -}}
{{- merge $set .Values.config | toYaml -}}
{{- end -}}

{{/* Fails for values that Kubernetes accepts and that cannot work. */}}
{{- define "penstock.check" -}}
{{- $several := or (gt (int .Values.replicas) 1) .Values.keda.enabled -}}
{{- $cache := .Values.cache.persistence -}}
{{- if and $several $cache.enabled (not $cache.existingClaim) (not (has "ReadWriteMany" $cache.accessModes)) -}}
{{- fail "several replicas cannot share a cache of ReadWriteOnce: set cache.persistence.accessModes to [ReadWriteMany], or cache.persistence.enabled to false" -}}
{{- end -}}
{{- if and .Values.keda.enabled (not .Values.keda.prometheusAddress) -}}
{{- fail "keda.prometheusAddress is empty: give the address of Prometheus, as in http://prometheus-operated.monitoring:9090" -}}
{{- end -}}
{{- if and .Values.keda.enabled (gt (int .Values.keda.minReplicas) (int .Values.keda.maxReplicas)) -}}
{{- fail "keda.minReplicas is larger than keda.maxReplicas" -}}
{{- end -}}
{{- end -}}

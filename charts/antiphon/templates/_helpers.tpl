{{/* The release's objects are named after it; the release `antiphon` gives `antiphon-operator`. */}}
{{- define "antiphon.fullname" -}}
{{- if contains "antiphon" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-antiphon" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "antiphon.image" -}}
{{- $tag := .root.Values.image.tag | default .root.Chart.AppVersion -}}
{{- if or (contains ":" .name) (contains "@" .name) }}{{ .root.Values.image.registry }}{{ .name }}{{ else }}{{ .root.Values.image.registry }}{{ .name }}:{{ $tag }}{{ end }}
{{- end }}

{{- define "antiphon.labels" -}}
app.kubernetes.io/name: antiphon
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "antiphon.selector" -}}
app.kubernetes.io/name: antiphon
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "antiphon.redisSecret" -}}
{{- if .Values.valkey.enabled }}{{ .Values.valkey.secret | default (printf "%s-redis" (include "antiphon.fullname" .)) }}{{ else }}{{ .Values.externalRedis.secret }}{{ end }}
{{- end }}

{{- define "antiphon.redisUrl" -}}
{{- if .Values.valkey.enabled }}redis://{{ include "antiphon.fullname" . }}-valkey.{{ .Release.Namespace }}.svc:6379/0{{ else }}{{ .Values.externalRedis.url }}{{ end }}
{{- end }}

{{- define "antiphon.workerImage" -}}
{{- if .Values.operator.workerImage }}{{ .Values.operator.workerImage }}{{ else }}{{ include "antiphon.image" (dict "root" . "name" .Values.worker.image) }}{{ end }}
{{- end }}

{{- define "antiphon.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "antiphon.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "antiphon.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* One pod a node where there are nodes enough. */}}
{{- define "antiphon.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "antiphon.selector" . | nindent 8 }}
{{- end }}

{{/* What the users of Valkey may do, by its access rules. */}}
{{- define "antiphon.operatorRights" -}}
~antiphon:* resetchannels -@all +@read +set +eval +time +zadd +zremrangebyscore +pexpire +hset +hdel +xadd +info +acl|setuser +acl|deluser +acl|list +ping +select +client|setinfo
{{- end }}

{{- define "antiphon.gatewayRights" -}}
~antiphon:models ~antiphon:{* resetchannels -@all +eval +time +info +xread +xrevrange +get +hget +hmget +scard +sscan +zrange +zrangebyscore +ping +select +client|setinfo (~antiphon:{*}:news -@all +hset +hdel +hkeys +pexpire)
{{- end }}

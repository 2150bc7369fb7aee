{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .pool }}
baton/pool: {{ . }}
{{- end }}
{{- end -}}

{{- /* Labels of an object: its selector's, and what changes with a release. */ -}}
{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: baton
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "baton.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "baton.labels" . | nindent 2 }}
{{- end -}}

{{- define "baton.image" -}}
{{- $tag := .image.tag | default .root.Values.image.tag | default .root.Chart.AppVersion -}}
{{- with .root.Values.image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- .image.repository -}}
{{- if .image.digest }}@{{ .image.digest }}{{ else }}:{{ $tag }}{{ end -}}
{{- end -}}

{{- /* A flag's value: 1073741824 must not become 1.073741824e+09. */ -}}
{{- define "baton.value" -}}
{{- if kindIs "slice" . -}}
{{- $parts := list -}}
{{- range . }}{{- $parts = append $parts (include "baton.value" .) }}{{- end -}}
{{- join "," $parts -}}
{{- else if and (kindIs "float64" .) (eq (floor .) .) -}}
{{- int64 . -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{- /* Flags of a map, a YAML list: {a: 1, b: false} -> [--a=1, --no-b]. */ -}}
{{- define "baton.flags" -}}
{{- range $flag, $value := . }}
{{- if kindIs "bool" $value }}
- {{ printf "--%s%s" (ternary "" "no-" $value) $flag | quote }}
{{- else if not (kindIs "invalid" $value) }}
- {{ printf "--%s=%s" $flag (include "baton.value" $value) | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* Every pool of instances by name, worker's values beneath its own: {prefill: {role: prefill, ...}, ...} */ -}}
{{- define "baton.pools" -}}
{{- $pools := dict -}}
{{- $own := dict "prefill" (merge (dict "role" "prefill") .Values.prefill) "decode" (merge (dict "role" "decode") .Values.decode) -}}
{{- range $name, $values := merge $own .Values.pools -}}
{{- $_ := set $pools $name (mergeOverwrite (deepCopy $.Values.worker) (deepCopy $values)) -}}
{{- end -}}
{{- toYaml $pools -}}
{{- end -}}

{{- define "baton.authSecret" -}}
{{- .Values.auth.existingSecret | default (printf "%s-auth" (include "baton.fullname" .)) -}}
{{- end -}}

{{- define "baton.tlsSecret" -}}
{{- .Values.tls.existingSecret | default (printf "%s-tls" (include "baton.fullname" .)) -}}
{{- end -}}

{{- define "baton.tlsName" -}}
{{- .Values.tls.name | default (printf "%s.%s.svc" (include "baton.fullname" .) .Release.Namespace) -}}
{{- end -}}

{{- define "baton.redisUsed" -}}
{{- if or .Values.redis.enabled .Values.redis.existingSecret }}true{{ end -}}
{{- end -}}

{{- define "baton.redisSecret" -}}
{{- .Values.redis.existingSecret | default (printf "%s-redis" (include "baton.fullname" .)) -}}
{{- end -}}

{{- /* Addresses of all KV store nodes: the pods' own names, which stay when they start again. */ -}}
{{- define "baton.kvstores" -}}
{{- $nodes := list -}}
{{- $name := printf "%s-kvstore" (include "baton.fullname" .) -}}
{{- range $i := until (int .Values.kvstore.replicas) -}}
{{- $nodes = append $nodes (printf "%s-%d.%s.%s.svc.%s:8200" $name $i $name $.Release.Namespace $.Values.clusterDomain) -}}
{{- end -}}
{{- join "," $nodes -}}
{{- end -}}

{{- /* Flags that all services share, a YAML map. */ -}}
{{- define "baton.accessFlags" -}}
token-file: /run/baton/auth/token
{{- if .Values.tls.enabled }}
tls-cert: /run/baton/tls/tls.crt
tls-key: /run/baton/tls/tls.key
tls-ca: /run/baton/tls/ca.crt
tls-name: {{ include "baton.tlsName" . | quote }}
{{- end }}
{{- end -}}

{{- /* Where the model is: {kind, path, servedName}; kind: path, claim, fetched, init or hub. */ -}}
{{- define "baton.model" -}}
{{- $source := .Values.model.source -}}
{{- $served := .Values.model.servedName -}}
{{- if .Values.model.init.image }}
kind: init
path: /models/{{ required "model.servedName is needed with model.init.image" $served }}
{{- else if not $source }}
kind: path
path: /opt/baton/models/baton-tiny
{{- else if hasPrefix "pvc://" $source }}
kind: claim
claim: {{ index (splitList "/" (trimPrefix "pvc://" $source)) 0 }}
path: /models/{{ rest (splitList "/" (trimPrefix "pvc://" $source)) | join "/" }}
{{- else if or (hasPrefix "https://" $source) (hasPrefix "http://" $source) }}
{{- $name := base $source | trimSuffix ".gz" | trimSuffix ".tgz" | trimSuffix ".tar" }}
{{- $served = $served | default $name }}
kind: fetched
path: /models/{{ $name }}-{{ sha256sum $source | trunc 8 }}
{{- else if hasPrefix "/" $source }}
kind: path
path: {{ $source }}
{{- else }}
kind: hub
path: {{ $source }}
{{- end }}
servedName: {{ $served | quote }}
{{- end -}}

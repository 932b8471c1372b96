{{- define "homing.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "homing.fullname" -}}
{{- $name := include "homing.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Name of the objects without a namespace. */}}
{{- define "homing.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "homing.fullname" .) -}}
{{- end -}}

{{- define "homing.envoyName" -}}
{{- printf "%s-envoy" (include "homing.fullname" . | trunc 57 | trimSuffix "-") -}}
{{- end -}}

{{/* Name of the Service that leads to each replica by DNS. */}}
{{- define "homing.headlessName" -}}
{{- printf "%s-headless" (include "homing.fullname" . | trunc 54 | trimSuffix "-") -}}
{{- end -}}

{{/* Name of the Service to which the pool points. */}}
{{- define "homing.pickerService" -}}
{{- ternary (include "homing.headlessName" .) (include "homing.fullname" .) .Values.service.headless -}}
{{- end -}}

{{/* Address that Envoy uses while the picker beside it is unavailable; empty if no other picker is reachable. */}}
{{- define "homing.secondPickerAddress" -}}
{{- if not .Values.bindAddresses.extProc -}}
{{- printf "%s:%d" (include "homing.headlessName" .) (int .Values.extProcPort) -}}
{{- end -}}
{{- end -}}

{{- define "homing.selectorLabels" -}}
app.kubernetes.io/name: {{ include "homing.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "homing.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "homing.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Name, namespace and labels of an object. Takes the root context. */}}
{{- define "homing.metadata" -}}
name: {{ include "homing.fullname" . }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "homing.labels" . | nindent 2 }}
{{- end -}}

{{- define "homing.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "homing.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/* Image of a `{repository, tag, digest}`: (list image defaultTag). */}}
{{- define "homing.image" -}}
{{- $image := index . 0 -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository ($image.tag | default (index . 1)) -}}
{{- end -}}
{{- end -}}

{{- define "homing.ownImage" -}}
{{- $_ := required "image.repository is not set: name the image that deploy/Dockerfile was built and pushed as, without its tag, for example --set image.repository=registry.example.com/homing" .Values.image.repository -}}
{{- include "homing.image" (list .Values.image .Chart.AppVersion) -}}
{{- end -}}

{{/* Name of the InferencePool; empty if there is none and pool.matchLabels selects the pods. */}}
{{- define "homing.poolName" -}}
{{- $pool := .Values.pool -}}
{{- if $pool.create -}}
{{- if not $pool.matchLabels -}}
{{- fail "pool.create is true: name the labels of the model-server pods in pool.matchLabels" -}}
{{- end -}}
{{- $pool.name | default .Release.Name -}}
{{- else if $pool.name -}}
{{- if $pool.matchLabels -}}
{{- fail "pool.matchLabels is set, but pool.name names an InferencePool that exists and has its own selector: set pool.create, or remove one of them" -}}
{{- end -}}
{{- $pool.name -}}
{{- else if not $pool.matchLabels -}}
{{- fail "there is nothing to serve: set pool.name to an InferencePool of this namespace, or pool.matchLabels to the labels of the model-server pods" -}}
{{- end -}}
{{- end -}}

{{/* pool.matchLabels as a label selector. */}}
{{- define "homing.labelSelector" -}}
{{- $terms := list -}}
{{- range $label, $value := .Values.pool.matchLabels -}}
{{- $terms = append $terms (printf "%s=%s" $label $value) -}}
{{- end -}}
{{- join "," $terms -}}
{{- end -}}

{{- define "homing.configMapName" -}}
{{- .Values.existingConfigMap | default (printf "%s-config" (include "homing.fullname" . | trunc 56 | trimSuffix "-")) -}}
{{- end -}}

{{- define "homing.terminationGracePeriodSeconds" -}}
{{- if kindIs "invalid" .Values.terminationGracePeriodSeconds -}}
{{- add (int .Values.drainTimeoutSeconds) 10 -}}
{{- else -}}
{{- int .Values.terminationGracePeriodSeconds -}}
{{- end -}}
{{- end -}}

{{/* Flags of `epp serve`, one on each line. */}}
{{- define "homing.arguments" -}}
{{- $pool := include "homing.poolName" . -}}
{{- if $pool }}
- --pool-name={{ $pool }}
{{- else }}
- --endpoint-selector={{ include "homing.labelSelector" . }}
- --endpoint-target-ports={{ range $index, $port := .Values.pool.targetPorts }}{{ if $index }},{{ end }}{{ int $port.number }}{{ end }}
{{- end }}
{{- with .Values.pool.nodeLabels }}
- --node-labels={{ join "," . }}
{{- end }}
- --config-file=/config/{{ .Values.configMapKey }}
{{- if .Values.configMapWatch.enabled }}
- --config-map={{ include "homing.configMapName" . }}
- --config-map-key={{ .Values.configMapKey }}
{{- end }}
{{- if .Values.lastGood.enabled }}
- --last-good-dir=/last-good
{{- end }}
- --grpc-port={{ int .Values.extProcPort }}
- --grpc-health-port={{ int .Values.grpcHealthPort }}
- --metrics-port={{ int .Values.metricsPort }}
{{- with .Values.bindAddresses.extProc }}
- {{ printf "--grpc-bind-address=%s" . | quote }}
{{- end }}
{{- with .Values.bindAddresses.grpcHealth }}
- {{ printf "--grpc-health-bind-address=%s" . | quote }}
{{- end }}
{{- with .Values.bindAddresses.metrics }}
- {{ printf "--metrics-bind-address=%s" . | quote }}
{{- end }}
{{- if .Values.debugToken.enabled }}
- --debug-token-file=/debug-token/{{ .Values.debugToken.key }}
{{- end }}
- --secure-serving={{ .Values.tls.enabled }}
{{- if and .Values.tls.enabled .Values.tls.secretName }}
- --cert-path=/tls
{{- end }}
{{- if .Values.tls.clientCASecretName }}
- --client-ca-file=/client-ca/ca.crt
{{- end }}
{{- if and .Values.tls.enabled (or .Values.tls.secretName .Values.tls.clientCASecretName) }}
- --enable-cert-reload=true
{{- end }}
{{- if .Values.leaderElection.enabled }}
- --ha-enable-leader-election=true
- --lease-name={{ include "homing.fullname" . }}
{{- end }}
{{- if include "homing.activeReplicas" . }}
- --replicas={{ int (ternary .Values.autoscaling.minReplicas .Values.replicas .Values.autoscaling.enabled) }}
{{- end }}
{{- if include "homing.peerMesh" . }}
- --peer-service={{ include "homing.peersName" . }}
- --peer-port={{ int .Values.peers.port }}
- --peer-secret-file=/peer-secret/{{ .Values.peers.secretKey }}
{{- else if include "homing.peers" . }}
{{- if .Values.peers.urlSecretName }}
- --peer-url-file=/peer-url/{{ .Values.peers.urlSecretKey }}
{{- else }}
- {{ printf "--peer-url=%s" .Values.peers.url | quote }}
{{- end }}
{{- end }}
{{- if .Values.snapshot.enabled }}
- --snapshot-dir=/snapshot
{{- end }}
{{- if .Values.sessionTokens.secretName }}
- --session-token-key-file=/session-tokens/{{ .Values.sessionTokens.secretKey }}
{{- end }}
{{- if .Values.sessionTokens.acceptUnsigned }}
- --accept-unsigned-session-tokens=true
{{- end }}
- --drain-grace={{ int .Values.drainGraceSeconds }}s
- --drain-timeout={{ int .Values.drainTimeoutSeconds }}s
{{- if .Values.standalone.enabled }}
- --envoy-admin-port=19000
{{- end }}
- --log-format={{ .Values.logFormat }}
- --v={{ int .Values.verbosity }}
{{- if .Values.tracing.enabled }}
- --tracing=true
{{- end }}
{{- if .Values.decisions.enabled }}
- --decisions-dir=/decisions/$(POD_NAME)
- --decisions-max-bytes={{ .Values.decisions.maxSize }}
- --decisions-max-age={{ .Values.decisions.maxAge }}
{{- end }}
{{- if .Values.capture.enabled }}
- --capture=/capture/$(POD_NAME)
- --capture-share={{ .Values.capture.share }}
- --capture-max-bytes={{ .Values.capture.maxSize }}
{{- if .Values.capture.saltSecretName }}
- --capture-salt-file=/capture-salt/{{ .Values.capture.saltSecretKey }}
{{- end }}
{{- end }}
{{- if and .Values.standalone.enabled (ne .Values.standalone.responseBodyMode "NONE") }}
- --parse-response-usage=true
{{- end }}
{{- range $name, $value := .Values.flags }}
- {{ printf "--%s=%s" $name (include "homing.scalar" $value) | quote }}
{{- end }}
{{- end -}}

{{/* A number as written, because Helm reads every number as a float. */}}
{{- define "homing.scalar" -}}
{{- if kindIs "float64" . -}}
{{- if eq (floor .) . -}}{{ printf "%.0f" . }}{{- else -}}{{ . }}{{- end -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{- define "homing.securityContext" -}}
{{- $restricted := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "capabilities" (dict "drop" (list "ALL")) -}}
{{- toYaml (mergeOverwrite $restricted (deepCopy .Values.securityContext)) -}}
{{- end -}}

{{- define "homing.podSecurityContext" -}}
{{- $restricted := dict "runAsNonRoot" true "runAsUser" 65532 "runAsGroup" 65532 "fsGroup" 65532 "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- toYaml (mergeOverwrite $restricted (deepCopy .Values.podSecurityContext)) -}}
{{- end -}}

{{/* Non-empty if an object of a foreign API is wanted: (list root switch api). */}}
{{- define "homing.wanted" -}}
{{- $switch := index . 1 -}}
{{- if eq (toString $switch) "auto" -}}
{{- if (index . 0).Capabilities.APIVersions.Has (index . 2) -}}yes{{- end -}}
{{- else if $switch -}}yes{{- end -}}
{{- end -}}

{{- define "homing.severalReplicas" -}}
{{- if or .Values.autoscaling.enabled (gt (int .Values.replicas) 1) -}}yes{{- end -}}
{{- end -}}

{{/* Several replicas that all decide. */}}
{{- define "homing.activeReplicas" -}}
{{- if not .Values.leaderElection.enabled -}}{{ include "homing.severalReplicas" . }}{{- end -}}
{{- end -}}

{{/* Non-empty if replicas share their state, in either way. */}}
{{- define "homing.peers" -}}
{{- if eq (toString .Values.peers.enabled) "auto" -}}
{{- include "homing.severalReplicas" . -}}
{{- else if .Values.peers.enabled -}}yes{{- end -}}
{{- end -}}

{{/* Non-empty if they connect to each other. */}}
{{- define "homing.peerMesh" -}}
{{- if and (include "homing.peers" .) (not .Values.peers.url) (not .Values.peers.urlSecretName) -}}yes{{- end -}}
{{- end -}}

{{/* Name of the headless Service, and of the created Secret. */}}
{{- define "homing.peersName" -}}
{{- printf "%s-peers" (include "homing.fullname" . | trunc 57 | trimSuffix "-") -}}
{{- end -}}

{{/* The secret in base64: that of the cluster, or a new one of 48 bytes, itself in base64. */}}
{{- define "homing.peerSecret" -}}
{{- $found := (lookup "v1" "Secret" .Release.Namespace (include "homing.peersName" .)).data | default dict -}}
{{- get $found .Values.peers.secretKey | default (randBytes 48 | b64enc) -}}
{{- end -}}

{{/* Name of the Secret with the token of the debug pages. */}}
{{- define "homing.debugTokenName" -}}
{{- .Values.debugToken.secretName | default (printf "%s-debug" (include "homing.fullname" . | trunc 57 | trimSuffix "-")) -}}
{{- end -}}

{{/* The token in base64: that of the cluster, or a new one of 48 letters and digits. */}}
{{- define "homing.debugToken" -}}
{{- $found := (lookup "v1" "Secret" .Release.Namespace (include "homing.debugTokenName" .)).data | default dict -}}
{{- get $found .Values.debugToken.key | default (randAlphaNum 48 | b64enc) -}}
{{- end -}}

{{/* Members that `flowControl` adds to the configuration given: the feature gate and its section. */}}
{{- define "homing.flowControl" -}}
{{- $values := .root.Values.flowControl }}
{{- $gates := .config.featureGates | default list }}
{{- range $gates }}
{{- if hasPrefix "flowControl" . }}
{{- fail "flowControl.enabled is true and config.featureGates has flowControl, expected only one of them" }}
{{- end }}
{{- end }}
{{- if .config.flowControl }}
{{- fail "flowControl.enabled is true and config has a section flowControl: set flowControl.enabled to false, and add flowControl to config.featureGates" }}
{{- end }}
{{- $section := dict "maxRequests" (int64 $values.maxRequests) "defaultRequestTTL" $values.defaultRequestTTL "defaultPriorityBand" (dict "fairnessPolicyRef" $values.fairnessPolicy) }}
{{- if ne (toString $values.maxBytes) "0" }}
{{- $_ := set $section "maxBytes" (include "homing.scalar" $values.maxBytes) }}
{{- end }}
{{- with $values.noEndpointRequestTTL }}
{{- $_ := set $section "noEndpointRequestTTL" . }}
{{- end }}
{{- toYaml (dict "featureGates" (append $gates "flowControl") "flowControl" $section) }}
{{- end }}

{{/* Seconds of a duration with one unit, such as 5m. */}}
{{- define "homing.seconds" -}}
{{- $unit := regexFind "[smh]$" . }}
{{- mul (trimSuffix $unit . | int64) (get (dict "s" 1 "m" 60 "h" 3600) $unit) }}
{{- end }}

{{/* The configuration with what other values add to it: `tokens.rendererUrl`, `kvEvents.enabled` and
`flowControl.enabled`. */}}
{{- define "homing.completedConfig" -}}
{{- $config := .Values.config | default (.Files.Get "files/default-config.yaml" | fromYaml) | deepCopy }}
{{- $plugins := $config.plugins }}
{{- $types := list }}
{{- range $plugins }}
{{- $types = append $types .type }}
{{- end }}
{{- if .Values.tokens.rendererUrl }}
{{- if or (has "token-producer" $types) (has "tokenizer" $types) }}
{{- fail "tokens.rendererUrl is set and config has a token-producer, expected only one of them" }}
{{- end }}
{{- $plugins = append $plugins (dict "type" "token-producer" "parameters" (dict "vllm" (dict "url" .Values.tokens.rendererUrl))) }}
{{- end }}
{{- if .Values.kvEvents.enabled }}
{{- if or (has "precise-prefix-cache-producer" $types) (has "precise-prefix-cache-scorer" $types) }}
{{- fail "kvEvents.enabled is true and config has a precise-prefix-cache-producer, expected only one of them" }}
{{- end }}
{{- $heard := dict }}
{{- $ports := dict }}
{{- with .Values.kvEvents.socketPort }}
{{- $_ := set $ports "socketPort" (int .) }}
{{- end }}
{{- with .Values.kvEvents.replaySocketPort }}
{{- $_ := set $ports "replaySocketPort" (int .) }}
{{- end }}
{{- with $ports }}
{{- $_ := set $heard "podDiscoveryConfig" . }}
{{- end }}
{{- with .Values.kvEvents.listenPort }}
{{- $_ := set $heard "zmqEndpoint" (printf "tcp://*:%d" (int .)) }}
{{- $_ := set $heard "discoverPods" false }}
{{- end }}
{{- $parameters := dict "tokenProcessorConfig" (dict "blockSizeTokens" 64) }}
{{- with $heard }}
{{- $_ := set $parameters "kvEventsConfig" . }}
{{- end }}
{{- $plugins = append $plugins (dict "type" "precise-prefix-cache-producer" "parameters" $parameters) }}
{{- end }}
{{- if .Values.flowControl.enabled }}
{{- $config = merge (include "homing.flowControl" (dict "root" . "config" $config) | fromYaml) $config }}
{{- end }}
{{- toYaml (set $config "plugins" $plugins) }}
{{- end }}

{{/* The port of `tokens.rendererUrl`. */}}
{{- define "homing.rendererPort" -}}
{{- $url := urlParse .Values.tokens.rendererUrl }}
{{- $port := regexFind ":[0-9]+$" $url.host | trimPrefix ":" }}
{{- $port | default (ternary "443" "80" (eq $url.scheme "https")) }}
{{- end }}

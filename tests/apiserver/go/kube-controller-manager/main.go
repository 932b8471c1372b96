// Command kube-controller-manager is what keeps Deployments, Leases and EndpointSlices of the cluster as they are written.
package main

import (
	"os"

	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-controller-manager/app"
)

func main() {
	os.Exit(cli.Run(app.NewControllerManagerCommand()))
}

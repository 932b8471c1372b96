// Command pause holds the namespaces of a pod, and buries the orphans of its containers.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	told := make(chan os.Signal, 16)
	signal.Notify(told, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for one := range told {
		if one != syscall.SIGCHLD {
			return
		}
		for {
			if buried, _ := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); buried <= 0 {
				break
			}
		}
	}
}

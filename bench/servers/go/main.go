// A server that does nothing: it answers as an endpoint picker would, and decodes the JSON of each
// body into a map, which is what any picker in Go has to do at least. The cost of everything else
// in the report is told in units of this one. It prints the port that it listens on.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	chunkBytesMax       = 62_000
	messageBytesMax     = 64 << 20
	concurrentStreams   = 20_000
	destinationHeader   = "x-gateway-destination-endpoint"
	destinationEndpoint = "10.0.0.1:8000"
)

type picker struct {
	extproc.UnimplementedExternalProcessorServer
}

func (picker) Process(stream extproc.ExternalProcessor_ProcessServer) error {
	var body []byte
	for {
		message, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		switch request := message.Request.(type) {
		case *extproc.ProcessingRequest_RequestHeaders:
			// Answered when the body has ended, as a picker has to.
		case *extproc.ProcessingRequest_RequestBody:
			body = append(body, request.RequestBody.Body...)
			if !request.RequestBody.EndOfStream {
				continue
			}
			var decoded map[string]any
			if err := json.Unmarshal(body, &decoded); err != nil {
				return status.Error(codes.InvalidArgument, err.Error())
			}
			if err := answer(stream, body); err != nil {
				return err
			}
		case *extproc.ProcessingRequest_ResponseHeaders:
			err := stream.Send(&extproc.ProcessingResponse{
				Response: &extproc.ProcessingResponse_ResponseHeaders{
					ResponseHeaders: &extproc.HeadersResponse{},
				},
			})
			if err != nil {
				return err
			}
		case *extproc.ProcessingRequest_ResponseBody:
			chunk := request.ResponseBody
			err := stream.Send(&extproc.ProcessingResponse{
				Response: &extproc.ProcessingResponse_ResponseBody{
					ResponseBody: echo(chunk.Body, chunk.EndOfStream),
				},
			})
			if err != nil {
				return err
			}
		}
	}
}

func answer(stream extproc.ExternalProcessor_ProcessServer, body []byte) error {
	headers := &extproc.HeadersResponse{
		Response: &extproc.CommonResponse{
			ClearRouteCache: true,
			HeaderMutation: &extproc.HeaderMutation{
				SetHeaders: []*core.HeaderValueOption{{
					Header: &core.HeaderValue{
						Key: destinationHeader, RawValue: []byte(destinationEndpoint),
					},
				}},
			},
		},
	}
	err := stream.Send(&extproc.ProcessingResponse{
		Response: &extproc.ProcessingResponse_RequestHeaders{RequestHeaders: headers},
	})
	for start := 0; err == nil && start < len(body); start += chunkBytesMax {
		end := min(start+chunkBytesMax, len(body))
		err = stream.Send(&extproc.ProcessingResponse{
			Response: &extproc.ProcessingResponse_RequestBody{
				RequestBody: echo(body[start:end], end == len(body)),
			},
		})
	}
	return err
}

func echo(chunk []byte, endOfStream bool) *extproc.BodyResponse {
	return &extproc.BodyResponse{
		Response: &extproc.CommonResponse{
			BodyMutation: &extproc.BodyMutation{
				Mutation: &extproc.BodyMutation_StreamedResponse{
					StreamedResponse: &extproc.StreamedBodyResponse{
						Body: chunk, EndOfStream: endOfStream,
					},
				},
			},
		},
	}
}

func main() {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	server := grpc.NewServer(
		grpc.MaxRecvMsgSize(messageBytesMax), grpc.MaxConcurrentStreams(concurrentStreams))
	extproc.RegisterExternalProcessorServer(server, picker{})
	fmt.Println(listener.Addr().(*net.TCPAddr).Port)
	if err := server.Serve(listener); err != nil {
		log.Fatal(err)
	}
}
